// Steps through the rounds: what each committed, and where plain decoding would be after as many passes.

const SECONDS = 1.6; // that a round is shown while playing
let current = 1, playing = null;

function drawText(id, end, marks) {
  const prompt = data.prompt_token_ids.length, from = prompt + end - marks.reduce((sum, [, count]) => sum + count, 0);
  const add = (className, pieces, marked) => {
    const text = pieces.join("");
    // A highlighted line break would not be seen.
    if (text) $(id).append(html("span", className, marked ? text.replaceAll("\n", "↵\n") : text));
  };
  $(id).replaceChildren();
  add("prompt", data.pieces.slice(0, prompt));
  add("", data.pieces.slice(prompt, from));
  marks.reduce((at, [name, count]) => (add(name, data.pieces.slice(at, at + count), true), at + count), from);
  $(id).scrollTop = $(id).scrollHeight;
}

function drawRace(round) {
  const {tree, plain, all} = reached(data, current), before = reached(data, current - 1);
  const added = tree - before.tree, behind = round.committed.length - added;
  const percentOf = count => `${100 * count / all}%`;
  $("tree-bar").style.width = percentOf(tree);
  $("plain-bar").style.width = percentOf(plain);
  $("tree-count").textContent = `${tree} of ${all} tokens after ${many(current, "round")}`;
  $("plain-count").textContent = `${plain} of ${all} tokens after ${current} ${current === 1 ? "pass" : "passes"}`;
  $("round").textContent = `This round adds ${many(added, "token")}; plain decoding adds ${plain - before.plain} in one pass`;
  const bonus = behind ? 0 : 1; // what lies behind the request's end is dropped, the bonus first
  drawText("tree-text", tree, [["accepted", added - bonus], ["bonus", bonus]]);
  drawText("plain-text", plain, [["plain", plain - before.plain]]);
  const tau = data.accept_lengths.slice(0, current).reduce((sum, count) => sum + count, 0) / current;
  $("figures").textContent = [
    `${many(round.tokens.length, "node")}`, `${round.path.length - 1} accepted and the bonus`,
    ...behind ? [`${many(behind, "token")} behind the request’s end dropped`] : [],
    `${tau.toFixed(2)} tokens a round so far (τ)`,
  ].join(" · ");
}

function show(number) {
  const count = data.rounds.length;
  current = Math.max(1, Math.min(number, count));
  const round = data.rounds[current - 1];
  $("slider").max = count;
  $("slider").value = current;
  $("slider").setAttribute("aria-valuetext", `round ${current} of ${count}`);
  $("where").textContent = `round ${current} of ${count}`;
  $("first").disabled = $("back").disabled = current === 1;
  $("next").disabled = $("last").disabled = current === count;
  drawRace(round);
  drawTree(round);
  if (location.hash !== `#round=${current}`) history.replaceState(null, "", `#round=${current}`);
}

// Plays from the round that is shown, or from the first if that is the last.
function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => {
    show(current + 1);
    if (current === data.rounds.length) play(false);
  }, 1000 * SECONDS) : null;
  $("play").replaceChildren(on ? "❚❚" : "▶", html("span", "", on ? " pause" : " play"));
  $("play").setAttribute("aria-label", on ? "pause" : "play");
  if (on && current === data.rounds.length) show(1);
}

// What a reader asks for ends the playing.
const go = number => { play(false); show(number); };
const inAddress = () => Number(/^#round=(\d+)$/.exec(location.hash)?.[1] ?? 1);
const KEYS = {
  ArrowLeft: () => go(current - 1), ArrowRight: () => go(current + 1), Home: () => go(1),
  End: () => go(data.rounds.length), " ": () => play(!playing), "+": () => zoom(drawn.scale * 1.25),
  "-": () => zoom(drawn.scale / 1.25), 0: fit, Escape: hideTip,
};

$("play").onclick = () => play(!playing);
$("first").onclick = KEYS.Home;
$("back").onclick = KEYS.ArrowLeft;
$("next").onclick = KEYS.ArrowRight;
$("last").onclick = KEYS.End;
$("slider").oninput = () => go(Number($("slider").value));
addEventListener("hashchange", () => go(inAddress()));
addEventListener("keydown", event => {
  // Controls keep their own keys: the slider moves by itself, and space presses a button.
  const own = event.target === $("slider") || event.key === " " && event.target.matches("button, .chip");
  if (!(event.key in KEYS) || own || !data.rounds.length || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  KEYS[event.key]();
});

const named = {draft_head: "draft head", algorithm_option: "with", top_p: "top-p", top_k: "top-k"};
$("settings").textContent = Object.entries(data.settings)
  .map(([name, value]) => `${named[name] ?? name} ${value}`)
  .concat(`finished by ${data.finish_reason}`)
  .join(" · ");
listenToTree();
play(false);
show(inAddress());
