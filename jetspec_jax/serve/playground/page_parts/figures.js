// The figures of a generation. Nothing of a page.

const sum = numbers => numbers.reduce((total, number) => total + number, 0);

// What has come of a generation: its rounds, and when.
function record() {
  return {rounds: [], text: "", reason: null, first: null, last: null, behind: 0};
}

function add(run, rounds, reason, now) {
  const count = sum(rounds.map(round => round.tokens));
  if (run.first === null && count) run.first = now;
  else if (count) [run.last, run.behind] = [now, run.behind + count];
  run.rounds.push(...rounds);
  run.text += rounds.map(round => round.text).join("");
  run.reason = reason ?? run.reason;
}

const tokensOf = run => sum(run.rounds.map(round => round.tokens));
const tauOf = run => run.rounds.length ? tokensOf(run) / run.rounds.length : null;
// Tokens per second from the first piece on: what came before it was waiting and reading of the prompt.
const speedOf = run => run.last > run.first && run.last !== null ? 1000 * run.behind / (run.last - run.first) : null;

// The first character where two texts differ; null where they are equal.
function difference(one, other) {
  if (one === other) return null;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
