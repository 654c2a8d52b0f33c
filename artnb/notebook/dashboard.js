// Draws the dashboard: facts, phase bar, charts (chart.js, put before this in one module), why groups did not train.
// Everything it shows comes from the widget's traits (dashboard.py); it loads nothing and asks the kernel nothing, so
// it works while a cell runs.

const PHASES = ["gather", "judge", "train", "save", "swap"];

// The parts above and below the charts -------------------------------------------------------------

class Head {
  constructor(root) {
    this.top = make("div", "artnb-top", root);
    this.legend = make("div", "artnb-legend", root);
    const phase = make("div", "artnb-phase", root);
    this.words = make("span", "artnb-words", phase);
    this.time = make("span", "artnb-time", phase);
    this.bar = make("div", "artnb-bar", phase);
    this.fill = make("div", "", this.bar);
    this.chips = make("div", "artnb-steps", phase);
    this.chip = Object.fromEntries(PHASES.map((name) => [name, make("span", "artnb-chip", this.chips, name)]));
  }

  facts(data, head) {
    const run = data[0];
    if (!run) return;
    const summary = run.summary, reward = (run.points.get("train/reward") || run.points.get("val/reward") || []).at(-1);
    const facts = [["step", summary.step === null ? "none yet"
      : head.planned ? `${summary.step} of ${head.planned}` : String(summary.step)]];
    if (reward) facts.push(["reward", number(reward[1])]);
    if (summary.tokens) facts.push(["tokens sampled", number(summary.tokens)]);
    if (summary.judge_tokens !== null) facts.push(["judge tokens", number(summary.judge_tokens)]);
    if (summary.judge_cost !== null) facts.push(["judge cost", number(summary.judge_cost)]);
    if (head.run_left !== null) facts.push(["run ends in about", duration(head.run_left)]);
    const signature = JSON.stringify([data.map((r) => r.name), facts]);
    if (signature === this.signature) return;
    this.signature = signature;
    const top = document.createDocumentFragment();
    make("span", "artnb-name", top, run.name);
    for (const [name, value] of facts) {
      const fact = make("span", "artnb-fact", top, `${name} `);
      make("b", "", fact, value);
    }
    this.top.replaceChildren(top);
    const legend = document.createDocumentFragment();
    if (data.length > 1) data.forEach((r, i) => keyOf(`var(--artnb-c${i % COLOURS})`, i, r.name, legend));
    this.legend.replaceChildren(legend);
  }

  // `age`: seconds since `head` came; the clock goes on while the kernel is busy.
  phase(head, age) {
    const running = Boolean(head.phase);
    const known = running && head.total;
    this.bar.classList.toggle("artnb-open", running && !known);
    this.fill.style.width = known ? `${Math.min(100, 100 * head.done / head.total)}%` : "";
    if (running) {
      const count = known ? `${head.done} of ${head.total} ${plural(head.unit, head.total)}`
        : head.done ? `${head.done} ${plural(head.unit, head.done)}` : "";
      const shown = Object.entries(head.shown).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
      const label = head.words && head.words !== head.phase ? `${head.phase}: ${head.words}` : head.phase;
      say(this.words, [label, count, shown].filter(Boolean).join(" · "));
      const left = head.left === null ? "" : `, about ${duration(head.left - age)} left`;
      say(this.time, `${duration(head.seconds + age)}${left}`);
    } else {
      say(this.words, "idle");
      say(this.time, head.worked ? `worked ${duration(head.worked)} in all` : "");
    }
    for (const [name, chip] of Object.entries(this.chip)) {
      const now = head.phase === name;
      const spent = (head.spent || {})[name], before = (head.before || {})[name];
      const seconds = now ? head.seconds + age + (spent || 0) : spent ?? before;
      chip.classList.toggle("artnb-now", now);
      say(chip, seconds === undefined || seconds === null ? name : `${name} ${duration(seconds)}`);
    }
  }
}

function why(root, data) {
  const lines = [];
  const words = (reasons) => Object.entries(reasons).map(([reason, n]) => `${n} × ${reason}`).join(", ");
  const total = (reasons) => Object.values(reasons).reduce((sum, n) => sum + n, 0);
  for (const run of data) {
    const s = run.summary, name = data.length > 1 ? `${run.name}: ` : "";
    if (s.last_groups) {
      lines.push(`${name}step ${s.step}: ${total(s.last_reasons)} of ${s.last_groups} groups did not train` +
        (total(s.last_reasons) ? `: ${words(s.last_reasons)}` : ""));
      lines.push(`${name}whole run: ${total(s.reasons)} of ${s.groups} groups` +
        (total(s.reasons) ? `: ${words(s.reasons)}` : ""));
    }
    if (total(s.trajectory_reasons || {})) lines.push(`${name}trajectories left out: ${words(s.trajectory_reasons)}`);
  }
  const signature = lines.join("\n");
  if (root.dataset.signature === signature) return;
  root.dataset.signature = signature;
  root.replaceChildren();
  if (!lines.length) return;
  make("b", "", root, "Why groups did not train");
  const list = make("ul", "", root);
  for (const line of lines) make("li", "", list, line);
}

// Theme: that of the page around the widget, read from the first background that is not transparent.
function pageTheme(el) {
  for (let node = el.parentElement; node; node = node.parentElement) {
    const [r, g, b, a = 1] = (getComputedStyle(node).backgroundColor.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    if (a > 0.5) return 0.299 * r + 0.587 * g + 0.114 * b < 128 ? "dark" : "light";
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// While a widget is shown, the static picture below it is not. Counted, because a widget may be shown twice.
function hideStatic(className) {
  const style = make("style", "", document.head, `.${CSS.escape(className)} { display: none; }`);
  return () => style.remove();
}

function render({ model, el }) {
  const root = make("div", "artnb-dashboard", el);
  const head = new Head(root);
  const grid = make("div", "artnb-grid", root);
  const reasons = make("div", "artnb-why", root);
  let charts = [], selected = null, select = null, hover = null, arrived = performance.now(), frame = 0, made = "";
  let data = [];

  const onHover = (step) => { hover = step; for (const [, chart] of charts) chart.hover(step); };

  function build(specs) {
    grid.replaceChildren();
    charts = specs.map((spec) => [spec, new Chart(grid, spec, onHover)]);
    selected = new Chart(grid, { id: "selected", title: "" }, onHover);
    select = make("select", "", null);
    select.setAttribute("aria-label", "metric to show");
    select.addEventListener("change", () => { model.set("metric", select.value); model.save_changes(); draw(); });
    selected.title.replaceChildren(select);
    charts.push([null, selected]);
  }

  function ownSpec() {
    const names = ownNames(data);
    let name = model.get("metric");
    const drawn = new Set(model.get("charts").flatMap((chart) => chart.series.flatMap((s) => [...s.columns, ...s.spread])));
    if (!names.includes(name)) name = names.find((n) => !drawn.has(`train/${n}`)) || names[0] || "";
    if (select.dataset.names !== JSON.stringify(names)) {
      select.dataset.names = JSON.stringify(names);
      select.replaceChildren(...names.map((n) => { const o = make("option", "", null, n); o.value = n; return o; }));
    }
    select.value = name;
    return ownChart(name, data);
  }

  function draw() {
    frame = 0;
    const specs = model.get("charts");
    data = dataOf(model);
    if (JSON.stringify(specs) !== made) { made = JSON.stringify(specs); build(specs); }
    head.facts(data, model.get("head"));
    for (const [spec, chart] of charts) chart.draw(spec || ownSpec(), data, hover);
    why(reasons, data);
  }

  function tick() {
    head.facts(data, model.get("head"));
    head.phase(model.get("head"), (performance.now() - arrived) / 1000);
  }

  const soon = () => { if (!frame) frame = requestAnimationFrame(draw); };
  const onHead = () => { arrived = performance.now(); tick(); };
  const onTheme = () => {
    const theme = model.get("theme");
    root.dataset.theme = theme === "auto" ? pageTheme(el) : theme;
  };
  const events = [["change:past", soon], ["change:recent", soon], ["change:runs", soon], ["change:charts", soon],
    ["change:metric", soon], ["change:head", onHead], ["change:theme", onTheme]];
  for (const [name, call] of events) model.on(name, call);
  const clock = setInterval(tick, 1000);
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", onTheme);
  const page = new MutationObserver(onTheme);
  for (const node of [document.documentElement, document.body]) page.observe(node, { attributes: true });
  const showStatic = hideStatic(model.get("static_class"));
  onTheme();
  draw();
  tick();
  requestAnimationFrame(onTheme);
  return () => {
    for (const [name, call] of events) model.off(name, call);
    clearInterval(clock);
    cancelAnimationFrame(frame);
    media.removeEventListener("change", onTheme);
    page.disconnect();
    showStatic();
  };
}

export default { render };
