// Asks the server, and reads what streams back. Nothing of a page.

// The JSON values of a reply of server-sent events, as they come.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the reply broke off before its end");
    const events = (rest + value).split(/\r\n\r\n|\n\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter(line => line.startsWith("data:"));
      const text = lines.map(line => line.slice(5).trimStart()).join("\n");
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
}

async function post(path, body, key, signal) {
  const headers = {"Content-Type": "application/json", ...key ? {Authorization: `Bearer ${key}`} : {}};
  const response = await fetch(path, {method: "POST", headers, body: JSON.stringify(body), signal});
  if (response.ok) return response;
  const {error, detail} = await response.json().catch(() => ({}));
  const said = error?.message ?? (typeof detail === "string" ? detail : null);
  throw new Error(said ?? `the server answered ${response.status} ${response.statusText}`);
}

// The rounds of a completion, some at a time: what each added, as text and as a number of tokens. The last of them
// come with why it ended.
async function* completion(asked, key, signal) {
  const path = asked.messages ? "v1/chat/completions" : "v1/completions";
  const body = {...asked, stream: true, return_rounds: true};
  for await (const event of eventsOf(await post(path, body, key, signal))) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (choice) yield {rounds: choice.rounds ?? [], reason: choice.finish_reason};
  }
}

// The same with each round's tree, one round at a time.
async function* traced(asked, key, signal) {
  const {model, ...body} = asked;
  for await (const event of eventsOf(await post("playground/rounds", body, key, signal))) {
    if (event.error) throw new Error(event.error.message);
    yield {rounds: event.rounds, labels: event.labels, reason: event.finish_reason};
  }
}
