// The page: what is asked, the text and the trees as they come, and the figures.

const BARS = 80; // rounds in the strip, the latest
const state = {chat: false, turns: [], asked: null, run: null, others: {}, stop: null, shown: 1, following: true};

// What is asked.

const numberIn = id => $(id).value.trim() === "" ? null : Number($(id).value);

// The settings and the text; a sampled request without a seed gets one here, so that it can be asked again.
function request() {
  const sampled = numberIn("temperature") > 0;
  const seed = numberIn("seed") ?? (sampled ? crypto.getRandomValues(new Uint32Array(1))[0] : null);
  const settings = {
    temperature: numberIn("temperature"), top_p: numberIn("top-p"), max_tokens: numberIn("max-tokens"), seed,
    budget: data.budget > 1 ? numberIn("budget") : null,
  };
  const given = Object.entries(settings).filter(([, value]) => value !== null);
  const what = state.chat ? {messages: state.turns.map(({role, content}) => ({role, content}))} : {prompt: $("prompt").value};
  return {model: data.model, ...what, ...Object.fromEntries(given)};
}

const busy = () => state.stop !== null;

// Runs what is asked and hands over each piece; true once it has ended by itself.
async function follow(stream, run, heard) {
  for await (const {rounds, reason, labels} of stream) {
    add(run, rounds, reason, performance.now());
    heard(rounds, labels);
  }
}

async function start() {
  if (state.chat) {
    state.turns.push({role: "user", content: $("prompt").value});
    $("prompt").value = "";
  }
  const asked = request(), withTrees = $("traced").checked && data.budget > 1, run = record();
  Object.assign(state, {asked, run, others: {}, following: true, shown: 1, withTrees});
  drawTalk();
  $("trees").hidden = !withTrees;
  $("tree").replaceChildren();
  $("round").textContent = "The first tree is on its way: a server compiles for it once";
  drawFigures();
  const stream = (withTrees ? traced : completion)(asked, $("key").value, begin("waiting for the first tokens"));
  try {
    await follow(stream, run, (rounds, labels) => {
      Object.assign(data.labels, labels);
      say("");
      addRuns(run, rounds);
      if (state.following) state.shown = run.rounds.length;
      later(draw);
    });
    say("");
  } catch (error) {
    fail(error);
  }
  $("talk").classList.remove("live");
  if (state.chat) run.text ? state.turns.push({role: "assistant", content: run.text, run}) : state.turns.pop();
  end();
}

// Asks for the same again: with trees, if it was watched, and plainly. What is compared is measured alike.
async function compare() {
  const {asked, run, withTrees} = state, stopped = begin("measuring");
  try {
    for (const [name, budget] of [...withTrees ? [["ours", asked.budget]] : [], ["plain", 1]]) {
      const own = state.others[name] = record();
      await follow(completion({...asked, budget}, $("key").value, stopped), own, () => later(drawFigures));
    }
    const at = difference(run.text, state.others.plain.text);
    say("");
    $("verdict").textContent = at === null ? "Plain decoding wrote the same text."
      : `Plain decoding’s text differs from character ${at + 1} on: rounding decided a near-tie.`;
    $("verdict").hidden = run.reason === null;
  } catch (error) {
    fail(error);
  }
  end();
}

function begin(what) {
  state.stop = new AbortController();
  say(what);
  drawControls();
  return state.stop.signal;
}

function end() {
  state.stop = null;
  drawControls();
  drawFigures();
}

function fail(error) {
  if (error.name === "AbortError") return say("stopped");
  say("");
  $("talk").append(html("p", "error", error.message));
  $("talk").scrollTop = $("talk").scrollHeight;
}

// What is shown.

const say = what => { $("state").textContent = what; };

// Draws once for all that comes before the next picture.
let due = null;
function later(what) {
  due ??= requestAnimationFrame(() => { due = null; what(); });
}

function draw() {
  drawFigures();
  if (state.withTrees && state.run.rounds.length) showRound(state.shown);
}

// The talk so far; the answer that is to come goes to its end.
function drawTalk() {
  $("talk").replaceChildren();
  $("talk").classList.toggle("chat", state.chat);
  if (state.chat) {
    for (const {role, content, run} of state.turns) {
      const turn = $("talk").appendChild(html("div", `turn ${role}`, run ? undefined : content));
      if (run) run.rounds.forEach((round, index) => turn.append(runOf(round, index)));
    }
    if (state.turns.at(-1)?.role === "user") $("talk").append(html("div", "turn assistant"));
  } else if (state.run) {
    const turn = $("talk").appendChild(html("div", "turn"));
    turn.append(html("span", "given", state.asked.prompt));
  }
  $("talk").classList.toggle("live", state.run !== null && state.run.reason === null);
  if (!$("talk").childNodes.length) {
    $("talk").append(html("p", "quiet empty", state.chat ? "Say something." : "The text appears here, each round’s tokens in one tint."));
  }
  $("talk").scrollTop = $("talk").scrollHeight;
}

// What one round added; more than one token is tinted, but for indents, and neighbours differ.
function runOf(round, index) {
  const made = html("span", round.tokens > 1 ? `run ${index % 2 ? "odd" : "even"}` : "run");
  const parts = round.text.split(/(^\s+|\s*\n\s*)/).filter(Boolean);
  made.append(...parts.map(part => part.trim() ? html("i", "", part) : part));
  made.dataset.round = index + 1;
  made.title = `round ${index + 1}: ${many(round.tokens, "token")}`;
  return made;
}

function addRuns(run, rounds) {
  const talk = $("talk"), turn = [...talk.querySelectorAll(".turn")].at(-1);
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  const before = run.rounds.length - rounds.length;
  rounds.forEach((round, index) => turn.append(runOf(round, before + index)));
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

// Shows the tree of a round, counted from 1; the latest is followed while more come.
function showRound(number) {
  const {rounds} = state.run, count = rounds.length;
  state.shown = Math.max(1, Math.min(number, count));
  const {tree, tokens} = rounds[state.shown - 1], accepted = tree.path.length - 1;
  $("slider").max = count;
  $("slider").value = state.shown;
  $("slider").setAttribute("aria-valuetext", `round ${state.shown} of ${count}`);
  $("back").disabled = state.shown === 1;
  $("next").disabled = state.shown === count;
  $("round").textContent = `Round ${state.shown} of ${count}: ${accepted} accepted of ${many(tree.tokens.length - 1, "guess").replace(/guesss$/, "guesses")}, and the bonus`;
  document.querySelectorAll(".run.current").forEach(run => run.classList.remove("current"));
  [...$("talk").querySelectorAll(`.run[data-round="${state.shown}"]`)].at(-1)?.classList.add("current");
  drawTree(tree);
  drawStrip();
}

function go(number) {
  if (!state.run?.rounds.length) return;
  state.following = number >= state.run.rounds.length;
  showRound(number);
}

function drawFigures() {
  const {run, others, withTrees} = state;
  const tau = run && tauOf(run), ours = run && speedOf(withTrees ? others.ours ?? record() : run);
  const plain = others.plain ? speedOf(others.plain) : null;
  const put = (id, value, digits) => { $(id).textContent = value === null ? "–" : value.toFixed(digits); };
  const widen = (id, share) => { $(id).style.width = `${100 * Math.min(share, 1)}%`; };
  put("tau", tau, 2);
  put("speed", ours, 0);
  put("plain", plain, 0);
  const most = Math.max(tau ?? 0, 1), fastest = Math.max(ours ?? 0, plain ?? 0);
  widen("tau-bar", (tau ?? 0) / most);
  widen("one-bar", run?.rounds.length ? 1 / most : 0);
  widen("speed-bar", fastest ? (ours ?? 0) / fastest : 0);
  widen("plain-bar", fastest ? (plain ?? 0) / fastest : 0);
  const done = run !== null && !busy() && run.rounds.length > 0;
  $("measure").hidden = !done || data.budget === 1 || others.plain !== undefined && plain !== null;
  $("measure").textContent = withTrees ? "Measure both" : "Measure plain decoding";
  $("note").hidden = $("measure").hidden || !withTrees;
  if (!others.plain) $("verdict").hidden = true;
  if (run?.rounds.length) {
    const ends = {length: "ended at max tokens", stop: "ended by itself"};
    $("summary").textContent = [many(tokensOf(run), "token"), many(run.rounds.length, "round"), ends[run.reason]]
      .filter(Boolean).join(" · ");
  }
  drawStrip();
}

// One bar for each round, as high as it added tokens.
function drawStrip() {
  const rounds = state.run?.rounds ?? [], from = Math.max(0, rounds.length - BARS);
  const most = Math.max(1, ...rounds.map(round => round.tokens));
  $("strip").hidden = $("strip-name").hidden = !rounds.length;
  $("strip").setAttribute("aria-label", `tokens of each round, at most ${most}`);
  $("strip").replaceChildren(...rounds.slice(from).map((round, index) => {
    const number = from + index + 1;
    const bar = html("i", state.withTrees && number === state.shown ? "current" : "");
    bar.style.height = `${100 * round.tokens / most}%`;
    bar.dataset.round = number;
    bar.title = `round ${number}: ${many(round.tokens, "token")}`;
    return bar;
  }));
}

function drawControls() {
  $("run").textContent = busy() ? "Stop" : state.chat ? "Send" : "Run";
  $("run").classList.toggle("stop", busy());
  document.body.classList.toggle("busy", busy());
  $("run").disabled = !busy() && !$("prompt").value.trim();
  $("clear").hidden = !state.chat || !state.turns.length || busy();
  for (const id of ["as-text", "as-chat"]) $(id).disabled = busy() || id === "as-chat" && !data.chat;
  for (const [id, on] of [["as-text", !state.chat], ["as-chat", state.chat]]) $(id).setAttribute("aria-pressed", on);
  $("prompt").placeholder = state.chat ? "Your message" : "The beginning of a text";
  $("prompt").setAttribute("aria-label", $("prompt").placeholder);
  $("traced").disabled = busy() || data.budget === 1;
}

function switchTo(chat) {
  Object.assign(state, {chat, turns: [], asked: null, run: null, others: {}});
  $("trees").hidden = true;
  $("prompt").value = chat ? "" : data.example;
  $("summary").textContent = "Run something, and its figures appear here.";
  say("");
  drawTalk();
  drawFigures();
  drawControls();
  if (innerWidth > 900) $("prompt").focus(); // a phone would open its keyboard
}

function showValues() {
  for (const id of ["temperature", "top-p"]) $(`${id}-value`).textContent = numberIn(id) === 0 ? "0, greedy" : numberIn(id);
}

// What is listened to.

$("composer").onsubmit = event => {
  event.preventDefault();
  busy() ? state.stop.abort() : $("prompt").value.trim() && start();
};
$("prompt").oninput = drawControls;
$("prompt").onkeydown = event => {
  const sends = event.key === "Enter" && !event.isComposing && (state.chat ? !event.shiftKey : event.ctrlKey || event.metaKey);
  if (sends) { event.preventDefault(); if (!busy()) $("composer").requestSubmit(); }
};
$("measure").onclick = compare;
$("clear").onclick = () => switchTo(true);
$("as-text").onclick = () => state.chat && switchTo(false);
$("as-chat").onclick = () => state.chat || switchTo(true);
$("temperature").oninput = $("top-p").oninput = showValues;
$("slider").oninput = () => go(Number($("slider").value));
$("back").onclick = () => go(state.shown - 1);
$("next").onclick = () => go(state.shown + 1);
for (const id of ["talk", "strip"]) {
  $(id).onclick = event => {
    const round = state.withTrees && event.target.closest("[data-round]")?.dataset.round;
    if (round) go(Number(round));
  };
}
addEventListener("keydown", event => {
  const typing = event.target.matches("input, textarea, select");
  if (typing || event.ctrlKey || event.altKey || event.metaKey || $("trees").hidden) return;
  const turn = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (turn) { event.preventDefault(); go(state.shown + turn); }
});

$("model").textContent = data.model;
$("as-chat").title = data.chat ? "" : "the model’s tokenizer has no chat template";
$("budget-row").hidden = data.budget === 1;
$("traced").parentElement.title = data.budget === 1 ? "this server decodes plainly: start it with a budget" : "";
$("key-row").hidden = !data.keyed;
for (const budget of [1, 2, 4, 8, 16, 32, 64, 128, 256].filter(own => own < data.budget).concat(data.budget)) {
  const option = html("option", "", budget === 1 ? "1, plain decoding" : `${budget}${budget === data.budget ? ", the server’s" : ""}`);
  option.value = budget;
  $("budget").append(option);
}
$("budget").value = data.budget;
$("settings").open = innerWidth > 900;
listenToTree();
showValues();
switchTo(data.begins_as_chat);
