// What a page shows, as numbers: which nodes of a tree, where, and how far the text is. Nothing of a browser.

// The nodes of a round, the bonus last. Parents come before their children.
function treeOf(round) {
  const onPath = new Set(round.path);
  const nodes = round.tokens.map((token, index) => ({
    index, token, rank: round.ranks[index], score: round.scores[index], target: round.target_log_probs[index],
    choice: round.choices[index], kind: onPath.has(index) ? "accepted" : "rejected",
  }));
  nodes.forEach((node, index) => {
    const parent = index ? nodes[round.parents[index]] : null;
    const draft = !parent || node.score === null || parent.score === null ? null : node.score - parent.score;
    Object.assign(node, {parent, draft, depth: parent ? parent.depth + 1 : 0});
  });
  const end = nodes[round.path.at(-1)];
  return [...nodes, {index: nodes.length, token: end.choice, kind: "bonus", parent: end, depth: end.depth + 1}];
}

// Keeps the accepted path and the `most` likeliest other nodes, and folds the rest into the kept nodes above.
// What is folded into a node of `opened` is shown all the same. Each shown node gets its shown `children`, each
// kept one in `below` how many nodes are folded into it. Returns the shown nodes.
function fold(nodes, most, opened) {
  const likelihood = node => node.score ?? -Infinity;
  // A node is never likelier than its parent, so the likeliest nodes are a tree.
  const ranked = nodes.filter(node => node.kind === "rejected")
    .sort((a, b) => likelihood(b) - likelihood(a) || a.index - b.index);
  const likeliest = new Set(ranked.slice(0, most));
  for (const node of nodes) {
    const kept = node.kind !== "rejected" || likeliest.has(node);
    Object.assign(node, {keeper: kept ? node : node.parent.keeper, below: 0, children: []});
    node.shown = kept || opened.has(node.keeper.index);
    if (!kept) node.keeper.below += 1;
    if (node.shown) node.parent?.children.push(node);
  }
  return nodes.filter(node => node.shown);
}

// Gives every shown node a lane. The accepted path has lane 0, and what was rejected branches off to both
// sides. A first child has its parent's lane; its siblings lie farther out than all that hangs from the nodes
// behind them, so that no two edges cross.
function placeLanes(shown) {
  const sides = [{sign: 1, free: [], load: 0}, {sign: -1, free: [], load: 0}];
  const place = (node, side, least) => {
    let lane = least;
    for (let at = node; at; at = at.children[0]) lane = Math.max(lane, side.free[at.depth] ?? 1);
    node.lane = side.sign * lane;
    side.free[node.depth] = lane + 1;
    side.load += 1;
    node.children.forEach((child, i) => {
      place(child, side, i ? Math.abs(node.children[i - 1].lane) + 1 : lane);
    });
  };
  const trunk = shown.filter(node => node.kind !== "rejected");
  for (const node of trunk.reverse()) {
    node.lane = 0;
    const last = new Map(sides.map(side => [side, 0]));
    for (const child of node.children.filter(child => child.kind === "rejected")) {
      const side = sides[0].load <= sides[1].load ? sides[0] : sides[1];
      place(child, side, last.get(side) + 1);
      last.set(side, Math.abs(child.lane));
    }
  }
}

// Gives every shown node the middle of its box, `x` and `y`, from its box's `width` and the `tail` to the right of
// it; returns the drawing's size. Depth runs to the right, or downwards if `upright`. All boxes of a lane have
// their middles on one line, and so do all of a depth.
function placeBoxes(shown, {height, gap, space, upright}) {
  const wide = key => strips(shown, key, node => node.width, node => node.tail, upright ? space : gap);
  const high = key => strips(shown, key, () => height, () => 0, upright ? gap : space);
  const [columns, rows] = upright ? [wide("lane"), high("depth")] : [wide("depth"), high("lane")];
  for (const node of shown) {
    node.column = columns.get(upright ? node.lane : node.depth);
    Object.assign(node, {x: node.column.middle, y: rows.get(upright ? node.depth : node.lane).middle});
  }
  return [columns, rows].map(all => Math.max(...[...all.values()].map(strip => strip.end)));
}

// Strips side by side in the order of their keys, as wide as their widest box and their longest tail.
function strips(shown, key, width, tail, gap) {
  const found = new Map();
  for (const node of shown) {
    const strip = found.get(node[key]) ?? {body: 0, tail: 0};
    found.set(node[key], {body: Math.max(strip.body, width(node)), tail: Math.max(strip.tail, tail(node))});
  }
  let start = 0;
  for (const at of [...found.keys()].sort((a, b) => a - b)) {
    const strip = found.get(at);
    Object.assign(strip, {start, middle: start + strip.body / 2, end: start + strip.body + strip.tail});
    start = strip.end + gap;
  }
  return found;
}

// How many of the likeliest nodes a panel of this size holds, boxes drawn at `least` of their size. Where the
// accepted path alone is too long for that, the others may be as small as it must be.
function mostThatFit(nodes, panel, least, place) {
  const scaleOf = most => {
    const [width, height] = place(fold(nodes, most, new Set()));
    return Math.min(panel.width / width, panel.height / height);
  };
  const wanted = Math.min(least, scaleOf(0));
  return [Infinity, 96, 64, 48, 40, 32, 26, 20, 15, 11, 8, 5, 3].find(most => scaleOf(most) >= wanted) ?? 0;
}

// Tokens generated after a number of rounds, and after as many passes of plain decoding; neither goes beyond the
// request's end.
function reached(data, rounds) {
  const all = data.token_ids.length;
  const committed = data.accept_lengths.slice(0, rounds).reduce((sum, count) => sum + count, 0);
  return {tree: Math.min(committed, all), plain: Math.min(rounds, all), all};
}
