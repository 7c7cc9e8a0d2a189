// Draws the tree of a round into its panel: boxes, edges, details of a node, folding, zoom.

const PAD = 8, LONGEST = 16, CHIP = 28;
const LEAST = 0.85; // boxes are drawn no smaller than this before nodes are folded
const NARROW = 640; // a window of at most this width has the likeliest nodes' tree upright
// Boxes have two lines, and one where all nodes are shown.
const FOLDED = {height: 38, gap: 30, space: 10, upright: false};
const UPRIGHT = {height: 38, gap: 18, space: 10, upright: true};
const WHOLE = {height: 20, gap: 24, space: 4, upright: false};
const pen = document.createElement("canvas").getContext("2d");
const drawn = {round: null, opened: new Set(), all: false, scale: 1, width: 1, height: 1};

const $ = id => document.getElementById(id);
const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const label = token => data.labels[token];
const short = text => [...text].length > LONGEST ? [...text].slice(0, LONGEST - 1).join("") + "…" : text;
const nats = logProb => logProb === null ? "−∞" : logProb.toFixed(2).replace("-", "−");

function percent(logProb) {
  const share = logProb === null ? 0 : 100 * Math.exp(logProb);
  return share === 0 ? "0%" : share < 0.1 ? "<0.1%" : share < 9.95 ? share.toFixed(1) + "%" : Math.round(share) + "%";
}

// Everything that comes from tokens goes in as text, never as markup.
function html(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// What stands beside a node's name: the probabilities of the draft head and of the target.
function figuresOf(node) {
  if (node.kind === "bonus" || !node.parent) return [["", node.parent ? "bonus" : "anchor"]];
  return [["draft", percent(node.draft)], ["", " · "], ["target", percent(node.target)]];
}

function measure(node) {
  const family = getComputedStyle(document.documentElement).getPropertyValue("--mono");
  node.label = short(label(node.token));
  node.chip = !node.below ? "" : drawn.opened.has(node.index) ? "−" : `+${node.below}`;
  pen.font = `600 12.5px ${family}`;
  const name = pen.measureText(node.label).width;
  pen.font = "11px system-ui, sans-serif";
  const figures = pen.measureText(figuresOf(node).map(([, text]) => text).join("")).width;
  node.width = Math.ceil(drawn.all ? name + 8 + figures : Math.max(name, figures)) + 2 * PAD;
  node.tail = node.chip ? CHIP : 0;
}

// A new round is folded as it fits; the same round keeps what was unfolded by hand.
function drawTree(round) {
  if (round !== drawn.round) Object.assign(drawn, {round, opened: new Set()});
  hideTip();
  $("tree").classList.toggle("whole", drawn.all);
  const nodes = treeOf(round), sizes = drawn.all ? WHOLE : innerWidth <= NARROW ? UPRIGHT : FOLDED;
  const place = shown => {
    shown.forEach(measure);
    placeLanes(shown);
    return placeBoxes(shown, sizes);
  };
  const shown = fold(nodes, drawn.all ? Infinity : mostThatFit(nodes, room(), LEAST, place), drawn.opened);
  const [width, height] = place(shown);
  const picture = svg("svg", {
    role: "group", viewBox: `-3 -3 ${width + 6} ${height + 6}`,
    "aria-label": `tree of ${round.tokens.length} nodes, ${round.path.length - 1} accepted`,
  });
  // Rejected edges first: the accepted path lies on top.
  const order = {rejected: 0, accepted: 1, bonus: 2};
  for (const node of shown.slice(1).sort((a, b) => order[a.kind] - order[b.kind])) {
    picture.append(svg("path", {class: `edge ${node.kind}`, d: edgeTo(node, sizes)}));
  }
  shown.forEach(node => picture.append(boxOf(node, sizes.height)));
  shown.filter(node => node.chip).forEach(node => picture.append(chipOf(node)));
  Object.assign(drawn, {width: width + 6, height: height + 6});
  $("tree").replaceChildren(picture);
  $("fold").textContent = drawn.all ? "likeliest nodes" : `all ${many(round.tokens.length, "node")}`;
  $("fold").disabled = !drawn.all && !shown.some(node => node.below);
  fit();
}

function room() {
  const {clientWidth, clientHeight} = $("tree");
  return {width: clientWidth - 24, height: clientHeight - 24};
}

function edgeTo(node, {upright, height}) {
  const parent = node.parent;
  if (upright) {
    const from = parent.y + height / 2, to = node.y - height / 2, bend = (from + to) / 2;
    return `M${parent.x} ${from}C${parent.x} ${bend} ${node.x} ${bend} ${node.x} ${to}`;
  }
  const from = parent.column.end, to = node.column.start, bend = (from + to) / 2;
  const curve = `H${from}C${bend} ${parent.y} ${bend} ${node.y} ${to} ${node.y}`;
  return `M${parent.x + parent.width / 2 + parent.tail} ${parent.y}${curve}H${node.x - node.width / 2}`;
}

function boxOf(node, height) {
  const group = svg("g", {class: `node ${node.kind}`, tabindex: 0, role: "img", "aria-label": spoken(node)});
  const left = node.x - node.width / 2, line = drawn.all ? 0 : 9;
  const name = svg("text", {class: "name", x: node.x, y: node.y - line}, node.label);
  const figures = svg("text", {class: "figures", x: node.x, y: node.y + line});
  figures.append(...figuresOf(node).map(([name, text]) => svg("tspan", {class: name}, text)));
  if (drawn.all) {
    name.setAttribute("x", left + PAD);
    figures.setAttribute("x", left + node.width - PAD);
    group.classList.add("line");
  }
  group.append(svg("rect", {x: left, y: node.y - height / 2, width: node.width, height, rx: 6}), name, figures);
  const pinned = () => group.classList.contains("pinned");
  group.addEventListener("pointerenter", () => document.querySelector(".pinned") || showTip(node, group));
  group.addEventListener("pointerleave", () => document.querySelector(".pinned") || hideTip());
  group.addEventListener("focus", () => showTip(node, group));
  group.addEventListener("blur", hideTip);
  group.addEventListener("click", event => {
    const again = pinned();
    hideTip();
    if (!again) { showTip(node, group); group.classList.add("pinned"); }
    event.stopPropagation();
  });
  return group;
}

function chipOf(node) {
  const left = node.x + node.width / 2;
  const open = drawn.opened.has(node.index);
  const said = `${open ? "fold" : "unfold"} ${node.below} less likely nodes below ${node.label}`;
  const group = svg("g", {class: "chip", tabindex: 0, role: "button", "aria-label": said, "data-index": node.index});
  group.append(
    svg("rect", {x: left + 2, y: node.y - 14, width: CHIP - 2, height: 28, rx: 6}),
    svg("text", {x: left + CHIP / 2 + 1, y: node.y}, node.chip),
  );
  const turn = event => {
    event.stopPropagation();
    event.preventDefault();
    open ? drawn.opened.delete(node.index) : drawn.opened.add(node.index);
    const before = group.getBoundingClientRect(), scale = drawn.scale;
    drawTree(drawn.round);
    const after = document.querySelector(`.chip[data-index="${node.index}"]`);
    // What was clicked stays where it was, and as large.
    zoom(scale);
    const now = after?.getBoundingClientRect();
    if (now) $("tree").scrollBy(now.left - before.left, now.top - before.top);
    after?.focus({preventScroll: true});
  };
  group.addEventListener("click", turn);
  group.addEventListener("keydown", event => ["Enter", " "].includes(event.key) && turn(event));
  return group;
}

const chances = node => `draft ${percent(node.draft)}, target ${percent(node.target)}`;
const spoken = node => `${label(node.token)}: ${node.parent && node.kind !== "bonus" ? chances(node) + ", " : ""}${fate(node)}`;

function fate(node) {
  if (node.kind === "bonus") return "bonus: the target’s choice behind the accepted path";
  if (!node.parent) return "anchor: committed before this round";
  if (node.kind === "accepted") return "accepted: the target’s choice";
  if (node.parent.kind === "accepted") return `rejected: the target chose ${label(node.parent.choice)}`;
  return "rejected with its parent";
}

function showTip(node, group) {
  const tip = $("tip");
  tip.replaceChildren(html("b", "", label(node.token)), ` token ${node.token}`, html("div", "", fate(node)));
  if (node.parent && node.kind !== "bonus") {
    tip.append(
      html("div", "draft", `draft head ${percent(node.draft)} (${nats(node.draft)} nats)`),
      html("div", "target", `target ${percent(node.target)} (${nats(node.target)} nats)`),
      html("div", "", `whole branch, by the draft head: ${percent(node.score)} (score ${nats(node.score)})`),
      html("div", "", `node ${node.index}, depth ${node.depth}, rank ${node.rank + 1} of its depth’s candidates`),
    );
  }
  if (node.kind === "rejected") tip.append(html("div", "", `after it the target would choose ${label(node.choice)}`));
  tip.hidden = false;
  const box = group.getBoundingClientRect(), {offsetWidth, offsetHeight} = tip;
  const below = box.bottom + 8 + offsetHeight < innerHeight;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, below ? box.bottom + 8 : box.top - offsetHeight - 8) + "px";
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelectorAll(".pinned").forEach(node => node.classList.remove("pinned"));
}

// Zoom changes the drawing's size; the panel scrolls. The middle of the panel stays where it is.
function zoom(scale, middle = [$("tree").clientWidth / 2, $("tree").clientHeight / 2]) {
  const panel = $("tree"), picture = panel.firstChild;
  if (!picture) return;
  const wanted = Math.min(3, Math.max(0.1, scale)), ratio = wanted / drawn.scale;
  const [x, y] = [panel.scrollLeft + middle[0], panel.scrollTop + middle[1]];
  drawn.scale = wanted;
  picture.setAttribute("width", drawn.width * wanted);
  picture.setAttribute("height", drawn.height * wanted);
  panel.scrollTo(x * ratio - middle[0], y * ratio - middle[1]);
}

function fit() {
  const {width, height} = room();
  zoom(Math.min(1, width / drawn.width, height / drawn.height));
}

function listenToTree() {
  const panel = $("tree");
  let grip = null, moved = 0, pinch = 0;
  panel.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const {left, top} = panel.getBoundingClientRect();
    zoom(drawn.scale * Math.exp(-event.deltaY / 300), [event.clientX - left, event.clientY - top]);
  }, {passive: false});
  // Fingers scroll the panel by themselves; a mouse drags it.
  panel.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") [grip, moved] = [event, 0]; });
  addEventListener("pointerup", () => { grip = null; });
  addEventListener("pointermove", event => {
    if (!grip) return;
    const by = [grip.clientX - event.clientX, grip.clientY - event.clientY];
    panel.scrollBy(...by);
    [grip, moved] = [event, moved + Math.hypot(...by)];
  });
  // The end of a drag is no click.
  panel.addEventListener("click", event => { if (moved > 4) event.stopPropagation(); moved = 0; }, true);
  const apart = ([a, b]) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  panel.addEventListener("touchmove", event => {
    if (event.touches.length !== 2) return;
    event.preventDefault();
    const now = apart(event.touches);
    if (pinch) zoom(drawn.scale * now / pinch);
    pinch = now;
  }, {passive: false});
  panel.addEventListener("touchend", () => { pinch = 0; });
  $("smaller").onclick = () => zoom(drawn.scale / 1.25);
  $("larger").onclick = () => zoom(drawn.scale * 1.25);
  $("fit").onclick = fit;
  $("fold").onclick = () => { drawn.all = !drawn.all; drawn.opened.clear(); drawTree(drawn.round); };
  addEventListener("click", hideTip);
  addEventListener("resize", () => drawn.round && drawTree(drawn.round));
}
