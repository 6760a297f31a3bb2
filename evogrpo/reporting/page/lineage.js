"use strict";
// The lineage: each row is a line of descent from a founder or a birth, along the child that continues it longest.
// Helpers are in page.js, which is loaded after it.

const begin = (member) => member.results[0][0] - 1;
const end = (member) => member.results.at(-1)[0];

// The path to the best member is one row. An ancestor that outlives the birth of its child gets a second row.
function treeNodes() {
  const nodes = [], owner = new Map();
  for (const member of run.members) {
    const follows = (each) => each.until !== null && each.from?.[0] === member.i;
    const heir = member.until === null ? null : run.members.find(follows);
    const node = { ...member, of: member, heir: heir ? heir.i : null, above: null };
    node.above = member.from && (owner.get(member.from[0])?.(member.from[1]) ?? member.from[0]);
    nodes.push(node);
    const later = heir ? member.results.filter(([generation]) => generation > begin(heir)) : [];
    if (!later.length) continue;
    const rest = { ...node, i: `rest of ${member.i}`, results: later, until: null, heir: null };
    Object.assign(rest, { above: member.i, from: [member.i, begin(heir)] });
    node.results = member.results.filter(([generation]) => generation <= begin(heir));
    nodes.push(rest);
    owner.set(member.i, (generation) => (generation > begin(heir) ? rest.i : member.i));
  }
  return nodes;
}

function treeRows() {
  const nodes = treeNodes(), rows = [], folds = nodes.length > 12;
  const children = new Map(), reach = new Map(), size = new Map();
  const of = (parent) => children.get(parent) || [];
  for (const node of nodes) children.set(node.above, [...of(node.above), node]);
  for (const node of [...nodes].reverse()) { // children come after their parents
    const below = of(node.i);
    reach.set(node.i, node.until !== null ? Infinity : Math.max(end(node), ...below.map((each) => reach.get(each.i))));
    size.set(node.i, below.reduce((sum, each) => sum + size.get(each.i), 1));
  }
  const further = (a, b) => reach.get(b.i) - reach.get(a.i);
  const emit = (root) => {
    const chain = [], sides = [];
    for (let node = root; node;) {
      const next = of(node.i).find((each) => each.i === node.heir)
        || of(node.i).filter((each) => begin(each) >= end(node)).sort(further)[0];
      chain.push(node);
      sides.push(...of(node.i).filter((each) => each !== next));
      node = next;
    }
    rows.push({ chain });
    emitAll(sides.sort((a, b) => begin(b) - begin(a)), root.i);
  };
  const emitAll = (list, key) => {
    const dead = list.filter((each) => reach.get(each.i) < run.last);
    const ended = dead.reduce((sum, each) => sum + size.get(each.i), 0);
    const open = !folds || ended < 2 || unfolded.has(key);
    for (const each of list) if (open || !dead.includes(each)) emit(each);
    if (folds && ended > 1) rows.push({ key, open, at: Math.min(...dead.map(begin)), lines: dead.length, ended });
  };
  emitAll([...of(null)].sort(further), "founders");
  return rows;
}

// Long periods without births and ends are compressed.
function generationScale() {
  const events = new Set([run.first, run.last]);
  for (const member of run.members)
    [begin(member), end(member), ...Object.keys(member.failed)].forEach((generation) => events.add(+generation));
  const sorted = [...events].sort((a, b) => a - b), at = new Map([[sorted[0], 0]]), quiet = [];
  sorted.slice(1).forEach((next, place) => {
    const before = sorted[place], long = next - before > 8 && run.last - run.first > 24, key = `quiet ${before}`;
    const step = long && !unfolded.has(key) ? 3 / (next - before) : 1;
    for (let g = before + 1; g <= next; g++) at.set(g, at.get(before) + (g - before) * step);
    if (long) quiet.push({ key, before, next });
  });
  return { at: (g) => at.get(g), units: at.get(run.last) || 1, quiet };
}

function button(root, key, open, x, y, text, anchor = "start") {
  const opened = { class: "fold", tabindex: 0, role: "button", "aria-expanded": open, "data-key": key };
  const group = add(root, "g", opened);
  add(group, "text", { x, y, "text-anchor": anchor }, text);
  const toggle = (event) => {
    event.stopPropagation();
    event.preventDefault();
    if (!unfolded.delete(key)) unfolded.add(key);
    draw();
    document.querySelector(`.fold[data-key="${key}"]`)?.focus();
  };
  group.addEventListener("click", toggle);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") toggle(event); });
}

function drawLineage(host) {
  const rows = treeRows(), scale = generationScale();
  const figure = add(host, "figure");
  const caption = add(figure, "figcaption", {}, "lineage ");
  add(caption, "span", {}, "by generation");
  const scroll = add(figure, "div", { class: "scroll" });
  const width = Math.max(260, scroll.clientWidth, 92 + 5 * scale.units), height = 24 * rows.length + 46;
  const root = add(scroll, "svg", { width, height, tabindex: 0, role: "group" });
  root.setAttribute("aria-label", "Lineage. Arrow keys select members, tab selects collapsed parts.");
  root.style.width = `${width}px`;
  const px = (g) => 16 + (scale.at(g) / scale.units) * (width - 78);
  const chart = { root, points: [], ring: null, rowOf: new Map() };
  charts.push(chart);
  listen(chart);
  scroll.scrollLeft = width; // show the latest generations first
  const later = [];
  let free = -Infinity; // right end of the last tick label
  for (const g of ticks({ low: run.first, high: run.last, whole: true }, Math.max(2, Math.floor(width / 70)))) {
    if (px(g) < free + 14) continue;
    free = px(g) + 7 * String(g).length;
    add(root, "path", { class: "grid", d: `M${px(g)} 24V${height - 18}` });
    add(root, "text", { x: px(g), y: height - 4, "text-anchor": "middle" }, g);
  }
  for (const { key, before, next } of scale.quiet)
    button(root, key, unfolded.has(key), (px(before) + px(next)) / 2, 14, `${next - before} quiet`, "middle");
  rows.forEach((row, place) => {
    const y = 24 * place + 40;
    if (row.chain) row.chain.forEach((member, link) => drawLife(chart, member, px, y, link === 0, later));
    else drawFold(root, row, px(row.at), y + 3, width);
  });
  later.forEach((paint) => paint());
}

function drawLife(chart, node, px, y, first, later) {
  const { root, points, rowOf } = chart, [from, to] = [px(begin(node)), px(end(node))], member = node.of;
  const best = node.until !== null ? "best" : "", lives = end(node) === run.last;
  rowOf.set(node.i, y);
  const source = node.above !== null && [px(node.from[1]), rowOf.get(node.above)];
  if (source && first) path(chart, member, [source, [source[0], y], [from, y]], best);
  path(chart, member, [[from, y], [to, y]], best);
  if (!lives && node.heir === null) path(chart, member, [[to, y - 4], [to, y + 4]]);
  later.push(() => {
    const text = `#${member.i}`;
    if (to - from > 7 * text.length + 8) add(root, "text", { class: "name", x: from + 5, y: y - 6 }, text);
    else if (lives) add(root, "text", { class: "name", x: to + 6, y: y + 4 }, text);
    const radius = node.i !== member.i ? 0 : best ? 4.5 : 3.5;
    add(root, "circle", { class: look(member, best), cx: from, cy: y, r: radius, "data-m": member.i });
  });
  for (const [g] of node.results) {
    points.push({ x: px(g), y, i: member.i, g });
    if (member.failed[g]) {
      path(chart, member, [[px(g) - 4, y - 4], [px(g) + 4, y + 4]]);
      path(chart, member, [[px(g) - 4, y + 4], [px(g) + 4, y - 4]]);
    }
  }
}

function drawFold(root, row, x, y, width) {
  const lines = `${row.lines} extinct ${row.lines > 1 ? "lines" : "line"}`, fold = row.open ? "▾ collapse" : "▸";
  const text = `${fold} ${lines}, ${row.ended} ${row.ended > 1 ? "members" : "member"}`;
  const fits = x + 7 * text.length < width;
  button(root, row.key, row.open, fits ? x + 4 : width - 4, y, text, fits ? "start" : "end");
}
