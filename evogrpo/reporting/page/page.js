"use strict";
// Draws the charts from the JSON in the page; lineage.js draws the lineage. All texts are set as textContent, never as
// markup.
const run = JSON.parse(document.getElementById("run").textContent);
const members = new Map(run.members.map((member) => [member.i, member]));
const card = document.getElementById("shown");
const charts = []; // every chart: its points and its ring
const drawn = new Map(); // elements of every member
const unfolded = new Set();
const picked = { point: null, pinned: false };

// --- elements and numbers

function add(parent, name, attributes = {}, text) {
  const picture = parent.namespaceURI.endsWith("svg") || name === "svg";
  const space = picture ? "http://www.w3.org/2000/svg" : parent.namespaceURI;
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  const plain = size === 0 || (size >= 1e-3 && size < 1e6);
  return plain ? String(+value.toPrecision(3)) : value.toExponential(2).replace(/\.?0+e/, "e");
}

const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const score = (mean, error) => (mean === null ? "–" : number(mean) + (error === null ? "" : " ± " + number(error)));

function ticks({ low, high, log, whole, ladder }, most) {
  if (ladder && ladder.length) return ladder.filter((value) => value >= low && value <= high);
  if (log) {
    const decades = Math.log10(high / low);
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const step of decades > 2 ? [1] : [1, 2, 5]) {
        const value = +(step * 10 ** power).toPrecision(12);
        if (value >= low && value <= high) found.push(value);
      }
    if (found.length >= 2) return found.filter((_, place) => place % Math.ceil(found.length / most) === 0);
  }
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-9 * step; at++) found.push(+(at * step).toPrecision(12));
  return found;
}

function range(values, log) {
  let low = Math.min(...extremes(values)), high = Math.max(...extremes(values));
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  log = log && low > 0;
  if (log) {
    const factor = Math.max((high / low) ** 0.08, 1.15);
    return { low: low / factor, high: high * factor, log };
  }
  const space = 0.07 * (high - low) || 0.1 * Math.abs(high) || 0.1;
  return { low: low - space, high: high + space, log };
}

const extremes = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// Values of collapsed members, far below the others, are drawn at the lower edge.
const above = (values, floor) => (floor === null ? values : values.filter((value) => value >= floor));

// --- one chart: axes and points

function frame(host, { title, unit = "", height, x, y, label }) {
  const figure = add(host, "figure");
  if (title) {
    const caption = add(figure, "figcaption", {}, title + " ");
    add(caption, "span", {}, unit);
  }
  const width = Math.max(260, figure.clientWidth || host.clientWidth);
  const root = add(figure, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img" });
  root.setAttribute("aria-label", `${label || title}. Arrow keys move from member to member.`);
  const yTexts = y.names ? y.names : (y.ticks = ticks(y, height > 200 ? 7 : 4)).map(number);
  const left = 14 + 7 * Math.min(16, Math.max(...yTexts.map((text) => text.length), 2));
  const box = { left, right: width - 14, top: 10, bottom: height - 24 };
  const place = (axis, from, to) => {
    if (axis.names) return (value) => from + ((axis.names.indexOf(value) + 0.5) / axis.names.length) * (to - from);
    const f = axis.log ? Math.log : (value) => value;
    const low = f(axis.low), span = f(axis.high) - low || 1;
    return (value) => from + (Math.min(1, Math.max(0, (f(value) - low) / span)) || 0) * (to - from);
  };
  const px = place(x, box.left, box.right), py = place(y, box.bottom, box.top);
  const room = Math.max(2, Math.floor((box.right - box.left) / 64));
  const xTicks = x.names || ticks(x, room);
  for (const value of y.names || y.ticks) {
    add(root, "path", { class: "grid", d: `M${box.left} ${py(value)}H${box.right}` });
    add(root, "text", { x: box.left - 6, y: py(value) + 4, "text-anchor": "end" }, number(value).slice(0, 16));
  }
  for (const value of xTicks)
    add(root, "text", { x: px(value), y: box.bottom + 17, "text-anchor": "middle" }, number(value));
  add(root, "path", { class: "grid", d: `M${box.left} ${box.bottom}H${box.right}` });
  const chart = { root, px, py, box, width, points: [], ring: null };
  charts.push(chart);
  listen(chart);
  return chart;
}

const look = (member, extra = "") => `m c${run.crowded ? "x" : member.colour % 8} ${extra}`;

function path(chart, member, points, extra = "") {
  const d = points.map(([x, y], place) => (place ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
  if (points.length > 1) add(chart.root, "path", { class: look(member, extra), d, "data-m": member.i });
}

// The part of a line that leads to the best member is drawn on top in its own colour.
function line(chart, member, points) {
  path(chart, member, points.map((each) => each.slice(0, 2)));
  if (member.until !== null)
    chart.later.push(() => path(chart, member, points.filter((each) => each[2] <= member.until), "best"));
}

// --- charts

function drawFitness(host) {
  const there = (value) => value !== null;
  const all = run.members.flatMap((member) => member.results.map((result) => result[1])).filter(there);
  const seen = [...above(all, run.floor), run.base, ...(run.test ? run.test.slice(0, 2) : [])].filter(there);
  const end = run.last + (run.test ? 0.06 : 0.02) * (run.last - run.first);
  const x = { low: run.first - 0.015 * (run.last - run.first), high: end, whole: true };
  const y = range(seen), low = run.floor !== null ? "; collapsed members are at the lower edge" : "";
  const unit = `by generation, ${run.terms.fitness}${low}`;
  const chart = frame(host, { height: 380, x, y, title: "fitness", unit, label: "Fitness by generation" });
  const { root, px, py, box } = chart;
  chart.later = [];
  if (run.base !== null) {
    add(root, "path", { class: "base", d: `M${box.left} ${py(run.base)}H${box.right}` });
    const place = { class: "halo", x: box.right, y: py(run.base) - 5, "text-anchor": "end" };
    chart.later.push(() => add(root, "text", place, `${run.terms.base}, ${run.terms.split}`));
  }
  for (const member of run.members) {
    const before = member.from ? [member.from[1], member.from[2]]
      : member.parent === null && run.base !== null ? [member.results[0][0] - 1, run.base] : [0, null];
    let points = before[1] === null ? [] : [[px(before[0]), py(before[1]), before[0], 0]];
    const stretches = [points];
    for (const [generation, fitness, error] of member.results) {
      if (fitness === null) { stretches.push((points = [])); continue; }
      const width = error === null ? 0 : py(fitness - error) - py(fitness + error);
      points.push([px(generation), py(fitness), generation, width]);
      chart.points.push({ x: px(generation), y: py(fitness), i: member.i, g: generation });
    }
    for (const stretch of stretches) {
      if (!run.crowded || member.until !== null) band(chart, member, stretch);
      line(chart, member, stretch);
    }
    for (const generation of Object.keys(member.failed)) {
      const at = { x: px(+generation), y: box.bottom - 8, i: member.i, g: +generation };
      chart.points.push(at);
      path(chart, member, [[at.x - 4, at.y - 4], [at.x + 4, at.y + 4]]);
      path(chart, member, [[at.x - 4, at.y + 4], [at.x + 4, at.y - 4]]);
    }
  }
  chart.later.forEach((draw) => draw());
  if (chart.points.length < 700)
    for (const { x, y, i, g } of chart.points) {
      const member = members.get(i), best = member.until !== null && g <= member.until;
      add(root, "circle", { class: look(member, best ? "best" : ""), cx: x, cy: y, r: best ? 4 : 2.5, "data-m": i });
    }
  if (run.test)
    [[run.first, run.test[0], "test"], [end, run.test[1], "test best"]].forEach(([g, fitness, kind]) => {
      const [x, y] = [px(g), py(fitness)];
      const mark = add(root, "path", { class: kind, d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z` });
      const who = kind === "test" ? run.terms.base : `member #${run.test[2]}`;
      add(mark, "title", {}, `${who}, test: ${number(fitness)}`);
    });
}

function band(chart, member, points) {
  if (points.length < 2) return;
  const up = points.map(([x, y, , error]) => `${x.toFixed(1)} ${(y - error / 2).toFixed(1)}`);
  const down = points.map(([x, y, , error]) => `${x.toFixed(1)} ${(y + error / 2).toFixed(1)}`).reverse();
  const best = member.until !== null ? "best band" : "band";
  add(chart.root, "path", { class: look(member, best), d: `M${up.join("L")}L${down.join("L")}Z`, "data-m": member.i });
}

// Declared names first; a journal may have others.
function namesOf(parameter, values) {
  return values.some((value) => typeof value === "string") ? [...new Set([...parameter.names, ...values])] : null;
}

function drawParameters(host) {
  run.parameters.forEach((parameter, place) => {
    const shown = run.members.filter((member) => member.values[place] !== null);
    const values = shown.map((member) => member.values[place]);
    const names = namesOf(parameter, values);
    const x = { low: run.first, high: run.last, whole: true };
    const y = names ? { names } : { ...range(values, parameter.log), ladder: parameter.ladder };
    const chart = frame(host, { title: parameter.name, unit: parameter.meaning, height: 190, x, y });
    const { px, py, points } = chart;
    chart.later = [];
    const slots = Math.max(...run.members.map((member) => member.colour)) + 1;
    for (const member of shown) {
      // Members with equal values are offset.
      const height = py(member.values[place]) - Math.min(2, 10 / slots) * (member.colour - (slots - 1) / 2);
      const corners = [];
      const from = member.from && members.get(member.from[0]);
      if (from && from.values[place] !== null)
        corners.push([px(member.from[1]), py(from.values[place]), member.from[1]]);
      corners.push([px(member.results[0][0] - 1), height, member.results[0][0] - 1]);
      for (const [generation] of member.results) {
        corners.push([px(generation), height, generation]);
        points.push({ x: px(generation), y: height, i: member.i, g: generation });
      }
      line(chart, member, corners);
    }
    chart.later.forEach((draw) => draw());
  });
}

function drawCurves(host) {
  for (const curve of run.curves) {
    const all = curve.lines.flatMap(([, points]) => points);
    const x = { low: 1, high: Math.max(2, ...extremes(all.map((point) => point[0]))), whole: true };
    const y = range(all.map((point) => point[2]));
    const chart = frame(host, { title: curve.title, unit: `by learning step, ${curve.unit}`, height: 190, x, y });
    chart.later = [];
    for (const [i, points] of curve.lines) {
      const member = members.get(i);
      if (!member) continue; // it has not finished a generation yet
      line(chart, member, points.map(([step, generation, value]) => [chart.px(step), chart.py(value), generation]));
      for (const [step, g, value] of points) chart.points.push({ x: chart.px(step), y: chart.py(value), i, g });
    }
    chart.later.forEach((draw) => draw());
  }
}

// --- selected member: details in the card, highlighted in every chart

function listen(chart) {
  const { root } = chart;
  const nearest = (event) => {
    const box = root.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let found = null, least = 48 * 48;
    for (const point of chart.points) {
      const away = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (away < least) [found, least] = [point, away];
    }
    return found;
  };
  root.addEventListener("pointermove", (event) => {
    if (!picked.pinned && event.pointerType !== "touch") show(nearest(event), event.clientX, event.clientY);
  });
  root.addEventListener("pointerleave", () => { if (!picked.pinned) show(null); });
  root.addEventListener("click", (event) => {
    const found = nearest(event);
    picked.pinned = found !== null;
    show(found, event.clientX, event.clientY);
  });
  root.addEventListener("keydown", (event) => {
    const found = neighbour(chart, event.key);
    if (!found) return;
    event.preventDefault();
    const box = root.getBoundingClientRect();
    picked.pinned = true;
    show(found, box.left + found.x, box.top + found.y);
  });
  root.addEventListener("blur", () => { if (!card.contains(document.activeElement)) unpin(); });
}

function neighbour(chart, key) {
  const side = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  if (!side || !chart.points.length) return null;
  const { i, g } = picked.point || {};
  const here = chart.points.find((point) => point.i === i && point.g === g);
  if (!here) return chart.points.find((point) => point.i === run.best && point.g === run.last) || chart.points.at(-1);
  const ahead = chart.points.filter((point) => side[0] ? (point.x - here.x) * side[0] > 0.5
    : Math.abs(point.x - here.x) < 0.5 && (point.y - here.y || point.i - here.i) * side[1] > 0);
  const other = (point) => (side[0] && point.i !== here.i ? 2 : 0); // prefer moving along a line
  const far = (point) => Math.abs(point.x - here.x) * 4 + Math.abs(point.y - here.y) + other(point);
  return ahead.reduce((least, point) => (!least || far(point) < far(least) ? point : least), null) || here;
}

function unpin() {
  picked.pinned = false;
  show(null);
}

function show(point, x, y) {
  const before = picked.point;
  picked.point = point;
  if (!point || !before || before.i !== point.i || before.g !== point.g) mark(point);
  card.hidden = !point;
  card.classList.toggle("pinned", picked.pinned);
  if (!point) return;
  const box = card.getBoundingClientRect();
  card.style.left = `${Math.max(8, x + 24 + box.width > innerWidth ? x - box.width - 24 : x + 24)}px`;
  card.style.top = `${Math.max(8, Math.min(y - 20, innerHeight - box.height - 8))}px`;
}

function mark(point) {
  document.querySelectorAll(".lit").forEach((element) => element.classList.remove("lit"));
  document.body.classList.toggle("picked", point !== null);
  charts.forEach((chart) => chart.ring && chart.ring.remove());
  if (!point) return;
  const line = new Set();
  const parent = (member) => member.from && members.get(member.from[0]);
  for (let member = members.get(point.i); member && !line.has(member.i); member = parent(member)) line.add(member.i);
  for (const i of line) (drawn.get(i) || []).forEach((element) => element.classList.add("lit"));
  for (const chart of charts) {
    const at = chart.points.find((each) => each.i === point.i && each.g === point.g);
    chart.ring = at ? add(chart.root, "circle", { class: "ring", cx: at.x, cy: at.y, r: 6 }) : null;
  }
  describe(members.get(point.i), point.g);
}

function describe(member, generation) {
  card.replaceChildren();
  const [, fitness, error, tokens, seconds, evaluation, otherwise] = member.results.find((result) => result[0] === generation);
  add(card, "b", {}, `#${member.i} in generation ${generation}`);
  const born = member.parent === null ? "" : `, born after generation ${member.born}`;
  add(card, "p", {}, `${member.source}${born}; slot ${member.slot}`);
  if (member.changes) add(card, "p", {}, member.changes);
  const list = add(card, "dl");
  const facts = [["fitness", member.failed[generation] ? "failed" : score(fitness, error)],
    ...run.parameters.map((parameter, place) => [parameter.name, number(member.values[place])]),
    [run.terms.tokens, count(tokens)], ["time", `${number(seconds)} s`]];
  if (otherwise) facts.splice(1, 0, ["measured", otherwise]);
  facts.push(["evaluation", `${count(evaluation)} ${run.terms.tokens}`]);
  for (const [name, value] of facts) {
    add(list, "dt", {}, name);
    add(list, "dd", {}, value);
  }
  if (member.failed[generation]) add(card, "p", {}, member.failed[generation]);
  add(card, "p", { class: "quiet" }, member.reason);
}

// --- all charts, redrawn when the width changes

const kinds = {
  fitness: drawFitness, lineage: drawLineage, parameters: drawParameters, curves: drawCurves,
};

function draw() {
  charts.length = 0;
  unpin();
  document.body.classList.toggle("crowded", run.crowded);
  for (const host of document.querySelectorAll(".plot")) {
    const kind = host.dataset.chart;
    host.hidden = false;
    host.replaceChildren();
    host.classList.toggle("many", kind !== "fitness" && kind !== "lineage");
    kinds[kind](host);
  }
  drawn.clear();
  for (const element of document.querySelectorAll("[data-m]")) {
    const i = +element.dataset.m;
    if (!drawn.has(i)) drawn.set(i, []);
    drawn.get(i).push(element);
  }
}

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
addEventListener("keydown", (event) => { if (event.key === "Escape") unpin(); });
document.addEventListener("click", (event) => {
  if (picked.pinned && !event.target.closest(".plot, #shown")) unpin();
});
draw();
