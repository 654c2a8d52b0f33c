// Numbers, marks, and one chart in SVG. dashboard.js, which draws the whole, follows in the same module.
// Texts are set as textContent only: a name that holds HTML stays a name.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "5 3", "1.5 3"];
const COLOURS = 7;
const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 16;

function make(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function shape(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.appendChild(node);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A number with three digits, or with as many as a difference of `size` needs to be seen.
function number(value, size) {
  if (value === null || value === undefined) return "–";
  const big = Math.abs(value);
  let text;
  if (big !== 0 && (big < 1e-3 || big >= 1e6)) text = value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  else if (big >= 1000) text = Math.round(value).toLocaleString("en");
  else {
    const digits = size > 0 && big > 0 ? Math.ceil(Math.log10(big / size)) + 1 : 3;
    text = String(Number(value.toPrecision(Math.min(7, Math.max(3, digits)))));
  }
  return text.replace(/-/g, "−");
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

function plural(unit, n) {
  return n === 1 || !unit ? unit : unit + (/(s|x|ch|sh)$/.test(unit) ? "es" : "s");
}

// Data ---------------------------------------------------------------------------------------------

// A run's past and recent blocks as name → [[step, value], ...], without what is missing.
function pointsOf(past, recent) {
  const points = new Map();
  for (const block of [past, recent]) {
    if (!block) continue;
    for (const [name, values] of Object.entries(block.columns)) {
      if (!points.has(name)) points.set(name, []);
      const list = points.get(name);
      values.forEach((value, i) => { if (value !== null) list.push([block.steps[i], value]); });
    }
  }
  return points;
}

function dataOf(model) {
  const past = model.get("past"), recent = model.get("recent");
  return model.get("runs").map((run, i) => ({ ...run, points: pointsOf(past[i], recent[i]) }));
}

// What a chart draws: one line for each series and run that has the metric.
function linesOf(chart, data) {
  const lines = [], scale = chart.scale || 1, many = data.length > 1;
  data.forEach((run, r) => chart.series.forEach((series, s) => {
    const column = series.columns.find((name) => run.points.has(name));
    if (!column) return;
    const spreads = series.spread.map((name) => run.points.get(name)).find(Boolean);
    lines.push({
      label: series.label, run: many ? run.name : "",
      colour: `var(--artnb-c${(many ? r : s) % COLOURS})`,
      mark: many ? r : s, dash: DASHES[(many ? s : 0) % DASHES.length],
      marked: series.points,
      points: run.points.get(column).map(([step, value]) => [step, value * scale]),
      spread: spreads && !many ? new Map(spreads) : null,
    });
  }));
  return lines;
}

function ownNames(data) {
  const names = new Set();
  for (const run of data) for (const column of run.points.keys()) names.add(column.slice(column.indexOf("/") + 1));
  return [...names];
}

function ownChart(name, data) {
  const splits = new Set();
  const order = (split) => (["train", "sft", "val"].indexOf(split) + 4) % 4;  // others last
  for (const run of data) for (const column of run.points.keys()) {
    if (column.slice(column.indexOf("/") + 1) === name) splits.add(column.slice(0, column.indexOf("/")));
  }
  const series = [...splits].sort((a, b) => order(a) - order(b)).map((split) => ({ label: split, columns: [`${split}/${name}`], spread: [],
    points: split !== "train" && split !== "sft" }));
  return { id: "selected", title: name, series };
}

// Drawing ------------------------------------------------------------------------------------------

function ticks(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(i * size);
  return found;
}

function markPath(kind, x, y, r) {
  const at = (dx, dy) => `${(x + dx * r).toFixed(1)},${(y + dy * r).toFixed(1)}`;
  switch (kind % 6) {
    case 0: return `M${at(-0.9, 0)}a${0.9 * r},${0.9 * r} 0 1,0 ${1.8 * r},0a${0.9 * r},${0.9 * r} 0 1,0 ${-1.8 * r},0Z`;
    case 1: return `M${at(0, -1.3)}L${at(1.3, 0)}L${at(0, 1.3)}L${at(-1.3, 0)}Z`;
    case 2: return `M${at(0, -1.2)}L${at(1.15, 0.9)}L${at(-1.15, 0.9)}Z`;
    case 3: return `M${at(-0.9, -0.9)}L${at(0.9, -0.9)}L${at(0.9, 0.9)}L${at(-0.9, 0.9)}Z`;
    case 4: return `M${at(0, 1.2)}L${at(1.15, -0.9)}L${at(-1.15, -0.9)}Z`;
    default: return `M${at(-1, -1)}L${at(1, 1)}M${at(-1, 1)}L${at(1, -1)}`;
  }
}

// The range of both axes; a single value gets some room around it.
function ranges(lines, chart) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const line of lines) for (const [step, value] of line.points) {
    const spread = (line.spread && line.spread.get(step)) || 0;
    x0 = Math.min(x0, step); x1 = Math.max(x1, step);
    y0 = Math.min(y0, value - spread); y1 = Math.max(y1, value + spread);
  }
  if (chart.low !== undefined) y0 = Math.min(y0, chart.low);
  if (chart.high !== undefined) y1 = Math.max(y1, chart.high);
  if (y1 - y0 <= 1e-12 * Math.max(1, Math.abs(y0))) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
  if (chart.span && y1 - y0 < chart.span) {  // noise that small is no change
    const middle = (y0 + y1) / 2;
    y0 = middle - chart.span / 2; y1 = middle + chart.span / 2;
  }
  const pad = (y1 - y0) * 0.06;
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  return { x0, x1, y0: y0 === chart.low ? y0 : y0 - pad, y1: y1 + pad };
}

class Chart {
  constructor(parent, chart, onHover) {
    this.root = make("figure", chart.wide ? "artnb-chart artnb-wide" : "artnb-chart", parent);
    this.root.dataset.chart = chart.id;
    const title = make("div", "artnb-title", this.root);
    this.title = make("span", "", title, chart.title);
    this.title.title = chart.title;
    this.value = make("span", "artnb-value", title);
    this.keys = make("div", "artnb-keys", this.root);
    this.svg = shape("svg", { role: "img" }, this.root);
    this.empty = make("div", "artnb-empty", this.root);
    if (chart.note) make("p", "artnb-note", this.root, chart.note);
    this.lines = [];
    // The browser tells the size once the page's layout is settled. Measured at any other moment it may be one that
    // nobody sees: JupyterLab takes its style sheet away and brings another within a frame when the theme changes.
    this.box = { width: 240, height: 124 };
    new ResizeObserver(([{ contentRect }]) => {
      if (!contentRect.width) return;  // hidden
      this.box = contentRect;
      if (this.lines.length) { this.drawLines(); this.hover(this.step); }
    }).observe(this.svg);
    const over = (event) => {
      const step = this.stepAt(event.clientX - this.svg.getBoundingClientRect().left);
      if (step !== null) onHover(step);
    };
    this.svg.addEventListener("pointermove", over);
    this.svg.addEventListener("pointerleave", () => onHover(null));
  }

  stepAt(pixel) {
    if (!this.place) return null;
    let best = null, distance = Infinity;
    for (const line of this.lines) for (const [step] of line.points) {
      const d = Math.abs(this.place.x(step) - pixel);
      if (d < distance) { distance = d; best = step; }
    }
    return best;
  }

  draw(chart, data, hover) {
    this.chart = chart;
    this.lines = linesOf(chart, data).filter((line) => line.points.length);
    const some = this.lines.length > 0;
    this.svg.style.display = some ? "" : "none";
    this.empty.style.display = some ? "none" : "";
    say(this.empty, some ? "" : chart.empty || "nothing logged yet");
    if (some) this.drawLines(); else this.place = null;
    this.hover(hover);
  }

  drawLines() {
    const { width, height } = this.box;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const { x0, x1, y0, y1 } = ranges(this.lines, this.chart);
    this.size = (y1 - y0) / 50;
    const x = (step) => LEFT + (step - x0) / (x1 - x0) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (y1 - value) / (y1 - y0) * (height - TOP - BOTTOM);
    this.place = { x, y, height };
    const layer = document.createDocumentFragment();
    for (const value of ticks(y0, y1, height > 140 ? 5 : 4)) {
      const at = y(value).toFixed(1);
      shape("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, stroke: "var(--artnb-line)" }, layer);
      shape("text", { x: LEFT - 5, y: at, "text-anchor": "end", "dominant-baseline": "middle" }, layer)
        .textContent = number(Math.abs(value) < (y1 - y0) * 1e-9 ? 0 : value, (y1 - y0) / 10);
    }
    for (const value of ticks(x0, x1, Math.min(8, Math.max(2, Math.floor(width / 50)))).filter(Number.isInteger)) {
      shape("text", { x: x(value).toFixed(1), y: height - 4, "text-anchor": "middle" }, layer).textContent = value;
    }
    for (const line of this.lines) this.drawLine(line, x, y, layer);
    this.cross = shape("line", { y1: TOP, y2: height - BOTTOM, stroke: "var(--artnb-quiet)", "stroke-dasharray": "2 2",
      visibility: "hidden" }, layer);
    this.svg.replaceChildren(layer);
  }

  drawLine(line, x, y, layer) {
    const at = line.points.map(([step, value]) => [x(step), y(value)]);
    const path = at.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("");
    if (line.spread && !line.marked) {
      const edge = (sign) => line.points.map(([step, value]) =>
        `${x(step).toFixed(1)},${y(value + sign * (line.spread.get(step) || 0)).toFixed(1)}`);
      shape("path", { d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z`, fill: line.colour,
        "fill-opacity": 0.18, class: "artnb-band" }, layer);
    }
    if (line.spread && line.marked) {
      for (const [step, value] of line.points) {
        const spread = line.spread.get(step);
        if (spread) shape("line", { x1: x(step), x2: x(step), y1: y(value - spread), y2: y(value + spread),
          stroke: line.colour, "stroke-opacity": 0.5 }, layer);
      }
    }
    shape("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": line.marked ? 1 : 1.8,
      "stroke-dasharray": line.marked ? "4 3" : line.dash, "stroke-linejoin": "round", class: "artnb-line" }, layer);
    const marks = line.marked && at.length <= 60 ? at : at.slice(-1);
    for (const [px, py] of marks) {
      shape("path", { d: markPath(line.mark, px, py, 3.2), fill: line.colour, stroke: line.mark % 6 === 5 ? line.colour :
        "var(--artnb-box)", "stroke-width": line.mark % 6 === 5 ? 1.6 : 0.8 }, layer);
    }
  }

  // The values at a step, or the newest ones.
  hover(step) {
    this.step = step;
    const shown = this.lines.map((line) => {
      const found = step === null ? line.points[line.points.length - 1] : line.points.find((p) => p[0] === step);
      return { line, value: found ? found[1] : null };
    });
    const where = step === null ? "" : `step ${step}`;
    const alone = this.lines.length === 1 && !this.lines[0].label && !this.lines[0].run;
    say(this.value, alone ? [where, number(shown[0].value, this.size)].filter(Boolean).join(": ") : where);
    const signature = JSON.stringify(shown.map(({ line, value }) => [line.label, line.colour, line.mark, line.run, value]));
    if (signature !== this.signature) {
      this.signature = signature;
      const keys = document.createDocumentFragment();
      // Several runs: a label, then each run's mark and value; the legend on top says which mark is whose.
      for (const label of alone ? [] : new Set(shown.map(({ line }) => line.label))) {
        const own = shown.filter(({ line }) => line.label === label);
        const row = make("span", "artnb-row", keys);
        if (own[0].line.run && label) make("span", "", row, label);
        for (const { line, value } of own) {
          keyOf(line.colour, line.mark, line.run ? "" : label, row, number(value, this.size)).title = line.run;
        }
      }
      this.keys.replaceChildren(keys);
      const words = shown.map(({ line, value }) => `${[line.run, line.label].filter(Boolean).join(" ") || "value"} ${number(value, this.size)}`).join(", ");
      this.svg.setAttribute("aria-label", `${this.chart.title}: ${words}`);
    }
    if (this.cross && this.place) {
      const on = step !== null && shown.some(({ value }) => value !== null);
      this.cross.setAttribute("visibility", on ? "visible" : "hidden");
      if (on) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.place.x(step).toFixed(1));
    }
  }
}

function keyOf(colour, mark, label, parent, value) {
  const span = make("span", "", parent);
  const svg = shape("svg", { width: 10, height: 10, viewBox: "0 0 10 10", style: "width:10px;height:10px;flex:none" });
  shape("path", { d: markPath(mark, 5, 5, 3.4), fill: colour, stroke: mark % 6 === 5 ? colour : "none",
    "stroke-width": 1.6 }, svg);
  span.appendChild(svg);
  if (label) make("span", "", span, label);
  if (value !== undefined) make("b", "", span, value);
  return span;
}
