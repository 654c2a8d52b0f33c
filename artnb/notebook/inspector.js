// The inspector's list, filters and comm. inspector_view.js, which draws trajectories, stands before this in one module.
// The list holds nodes only for the rows in sight; messages are asked for when a trajectory is opened.

const ROW = 30, TALL = 52; // pixels of a row, as in inspector.css
const NARROW = 900, ONE_LINE = 440; // pixels: of the widget, below which list and messages stand one above the other;
// of the list, below which a row has two lines, so that no column of it is cut
const AROUND = 8; // rows that are drawn above and below the sight
const PATIENCE = 1500; // ms until it is said that the kernel does not answer
let views = 0;

function render({ model, el }) {
  const mine = `v${++views}-${Math.random().toString(36).slice(2, 8)}`;
  const root = make("div", "artnb-inspector");
  el.append(root);
  const state = {
    index: null, numbers: [], rows: [], closed: new Set(), query: {}, at: null, showing: null,
    height: ROW, sight: 0, colouring: "text", standings: new Map(), wanted: new Set(), kept: new Map(), selected: new Set(model.get("selected") || []),
  };

  // Asking the kernel -----------------------------------------------------------------------------
  const waiting = new Map();
  let asked = 0;
  function ask(kind, content, onAnswer) {
    const id = `${mine}-${++asked}`;
    waiting.set(id, { onAnswer, since: Date.now() });
    model.send({ ...content, kind, ask: id });
    setTimeout(patience, PATIENCE + 50);
    return id;
  }
  function patience() {
    const late = [...waiting.values()].some((one) => Date.now() - one.since >= PATIENCE);
    root.classList.toggle("late", late);
    if (late) say(state.index ? "waiting for the kernel, which is busy or gone …" : "The kernel does not answer (yet). Below is what was saved with the notebook.");
  }
  function received(content, buffers) {
    const one = waiting.get(content.ask);
    if (!one) return; // another view's
    one.since = Date.now();
    if (content.kind === "error") {
      waiting.delete(content.ask);
      say(content.message, true);
    } else if (!one.onAnswer(content, buffers || [])) waiting.delete(content.ask);
    if (!waiting.size && root.classList.contains("late")) { root.classList.remove("late"); count(); }
  }

  // The parts -------------------------------------------------------------------------------------
  const bar = make("div", "bar");
  const status = make("div", "status");
  const said = make("span", "said", "opening …");
  const body = make("div", "body");
  const list = make("div", "list");
  list.tabIndex = 0;
  list.setAttribute("aria-label", "trajectories");
  const space = make("div", "space");
  list.append(space);
  const detail = make("div", "detail");
  body.append(list, detail);
  root.append(bar, status, body);

  function say(text, wrong = false) {
    said.textContent = text;
    said.classList.toggle("wrong", wrong);
  }

  // Filters ---------------------------------------------------------------------------------------
  const inputs = {};
  let soon = 0;
  function field(name, node, label) {
    inputs[name] = node;
    node.dataset.filter = name;
    node.setAttribute("aria-label", label);
    node.title = label;
    node.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(search, node.tagName === "INPUT" ? 250 : 0); });
    return node;
  }
  function input(name, label, width, type = "text") {
    const node = make("input");
    node.type = type;
    node.placeholder = label;
    node.style.width = width;
    if (type === "number") node.step = "any";
    return field(name, node, label);
  }
  function choice(name, label, options) {
    const node = make("select");
    for (const [value, text] of options) { const option = make("option", "", text); option.value = value; node.append(option); }
    return field(name, node, label);
  }
  function drawBar() {
    const { index } = state;
    const names = Object.keys(index.metrics);
    const place = make("select", "place");
    place.title = "step and split";
    for (const [step, split] of index.saved.slice().reverse()) {
      const option = make("option", "", `step ${step} · ${split}`);
      option.value = JSON.stringify({ step, split });
      option.selected = step === index.step && split === index.split;
      place.append(option);
    }
    place.addEventListener("change", () => ask("open", JSON.parse(place.value), opened));
    const down = field("descending", make("input"), "largest first");
    down.type = "checkbox";
    const downLabel = make("label", "check");
    downLabel.append(down, make("span", "", "largest first"));
    bar.replaceChildren(
      ...(index.title ? [make("b", "", index.title)] : []),
      ...(index.saved.length ? [place] : []),
      input("text", "text in messages", "150px"), input("low", "reward ≥", "88px", "number"), input("high", "reward ≤", "88px", "number"),
      choice("stop", "stop reason", [["", "any stop reason"], ...index.stops.map((stop) => [stop, stop])]),
      choice("trained", "trained", [["", "trained or not"], ["yes", "trained"], ["no", "not trained"]]),
      ...(names.length ? [
        choice("metric", "metric to filter by", [["", "any metric"], ...names.map((name) => [name, name])]),
        input("metricLow", "≥", "60px", "number"), input("metricHigh", "≤", "60px", "number"),
      ] : []),
      choice("sort", "sort by", [["group", "in groups"], ...["reward", "turns", "tokens", "stop"].map((s) => [s, `by ${s}`]), ...names.map((name) => [`metric/${name}`, `by ${name}`])]),
      downLabel,
      button("reset", "show all", () => { for (const node of Object.values(inputs)) { node.value = node.tagName === "SELECT" ? node.options[0].value : ""; node.checked = false; } search(); }),
    );
  }
  const bound = (name) => (inputs[name] && inputs[name].value !== "" ? Number(inputs[name].value) : null);
  function search() {
    clearTimeout(soon);
    const query = { text: inputs.text.value, reward: [bound("low"), bound("high")], sort: inputs.sort.value, descending: inputs.descending.checked };
    if (inputs.stop.value) query.stop = [inputs.stop.value];
    if (inputs.trained.value) query.trained = inputs.trained.value === "yes";
    if (inputs.metric && inputs.metric.value) query.metrics = { [inputs.metric.value]: [bound("metricLow"), bound("metricHigh")] };
    state.query = query;
    say(query.text ? "searching …" : "…");
    const id = ask("query", { query }, (answer) => {
      if (id !== state.newest) return; // an older question's answer
      state.numbers = answer.numbers;
      list.scrollTop = 0;
      arrange();
    });
    state.newest = id;
  }

  // The list --------------------------------------------------------------------------------------
  function arrange() {
    const grouped = (state.query.sort || "group") === "group";
    const rows = [];
    let group = null;
    for (const number of state.numbers) {
      const own = state.index.group[number];
      if (grouped && own !== group) rows.push({ group: (group = own), shown: 0 });
      if (grouped) {
        const head = rows.findLast((row) => row.group === own && row.number === undefined);
        head.shown++;
        if (state.closed.has(own)) continue;
      }
      rows.push({ number, group: own, grouped });
    }
    if (grouped && !filtered()) // groups whose rollouts all failed have no trajectory, and are told of nevertheless
      state.index.groups.forEach((one, at) => { if (!one.members.length) rows.push({ group: at, shown: 0 }); });
    state.rows = rows;
    space.style.height = `${rows.length * state.height}px`;
    for (const node of drawn.values()) node.remove();
    drawn.clear();
    count();
    paint();
  }
  const filtered = () => state.numbers.length < state.index.group.length;
  function count() {
    if (!state.index) return;
    const all = state.index.group.length;
    const shown = state.numbers.length;
    say(`${shown === all ? "" : `${shown.toLocaleString()} of `}${all.toLocaleString()} trajectories in ${state.index.groups.length.toLocaleString()} groups`);
    const ticked = state.selected.size;
    download.textContent = ticked ? `download ${ticked.toLocaleString()} ticked` : `download ${shown.toLocaleString()} shown`;
    download.disabled = !(ticked || shown);
    untick.disabled = !ticked;
  }
  const drawn = new Map();
  let frame = 0;
  function paint() {
    frame = 0;
    const first = Math.max(0, Math.floor(list.scrollTop / state.height) - AROUND);
    const last = Math.min(state.rows.length, Math.ceil((list.scrollTop + state.sight) / state.height) + AROUND);
    for (const [at, node] of drawn) if (at < first || at >= last) { node.remove(); drawn.delete(at); }
    for (let at = first; at < last; at++) {
      if (drawn.has(at)) continue;
      const row = state.rows[at];
      const node = row.number === undefined ? groupRow(row) : trajectoryRow(row);
      node.style.top = `${at * state.height}px`;
      drawn.set(at, node);
      space.append(node);
      if (!state.standings.has(row.group)) state.wanted.add(row.group);
    }
    if (state.wanted.size) { clearTimeout(state.later); state.later = setTimeout(standingsInSight, 120); }
  }
  function redraw() {
    for (const node of drawn.values()) node.remove();
    drawn.clear();
    paint();
  }
  function standingsInSight() {
    const seen = new Set([...drawn.keys()].map((at) => state.rows[at].group));
    const groups = [...state.wanted].filter((group) => seen.has(group) && !state.standings.has(group));
    state.wanted.clear();
    if (!groups.length) return;
    let left = groups.length;
    for (const group of groups) state.standings.set(group, null); // asked for
    ask("standings", { groups }, (answer) => {
      state.standings.set(answer.group, new Map(answer.standings.map(([number, ...rest]) => [number, rest])));
      for (const [at, node] of drawn) if (state.rows[at].group === answer.group && state.rows[at].number !== undefined) stand(node.querySelector(".stand"), state.rows[at]);
      return --left > 0;
    });
  }
  function stand(node, row) {
    const known = state.standings.get(row.group);
    const values = known && known.get(row.number);
    if (!values) return;
    const [trained, advantage, reason] = values;
    node.textContent = trained ? (advantage === null ? "●" : `● ${signed(+advantage.toFixed(2))}`) : "○";
    node.title = trained ? `trained${advantage === null ? "" : ` with advantage ${signed(advantage)}`}${reason ? `: ${reason}` : ""}` : `not trained: ${reason}`;
  }
  function groupRow(row) {
    const group = state.index.groups[row.group];
    const node = make("div", "row group");
    const fact = [`${row.shown < group.members.length ? `${row.shown} of ` : ""}${group.members.length}`];
    if (group.mean !== null) fact.push(`mean ${decimal(+group.mean.toPrecision(3))}${group.std === null ? "" : ` ± ${decimal(+group.std.toPrecision(2))}`}`);
    node.append(make("span", "twist", state.closed.has(row.group) ? "▸" : "▾"), make("b", "", `group ${row.group}`), make("span", "", fact.join(" · ")));
    if (group.failures) { const failed = make("span", "warn", `${group.failures} failed`); failed.title = group.failed.join("\n"); node.append(failed); }
    const about = make("span", "last", group.metadata.map(([name, value]) => `${name}: ${value}`).join(" · "));
    about.dir = "auto";
    node.append(about);
    if (group.members.length > 1) node.append(button("side by side", "the group's trajectories next to each other", (event) => { event.stopPropagation(); compare({ group: row.group }, `group ${row.group}`); }));
    node.addEventListener("click", () => { state.closed.has(row.group) ? state.closed.delete(row.group) : state.closed.add(row.group); arrange(); });
    return node;
  }
  function trajectoryRow(row) {
    const { index } = state;
    const n = row.number;
    const node = make("div", `row${n === state.at ? " current" : ""}`);
    const tick = make("input");
    tick.type = "checkbox";
    tick.checked = state.selected.has(n);
    tick.title = "tick to compare, to download, or for inspector.selection()";
    tick.addEventListener("click", (event) => { event.stopPropagation(); tick.checked ? state.selected.add(n) : state.selected.delete(n); keepTicks(); });
    const reward = make("span", "reward");
    const barNode = make("span", "height");
    barNode.style.width = `${Math.round(46 * (index.height[n] ?? 0))}px`;
    reward.append(barNode, make("span", "value", index.reward[n]));
    const standNode = make("span", "stand", "·");
    stand(standNode, row);
    const last = make("span", "last", index.last[n]);
    last.dir = "auto";
    const size = make("span", "size", `${index.turns[n]}× ${index.tokens[n].toLocaleString()}`);
    size.title = `${index.turns[n]} sampled turns, ${index.tokens[n].toLocaleString()} sampled tokens`;
    node.append(tick, make("span", "place", row.grouped ? `${index.index[n]}` : `${row.group}.${index.index[n]}`), reward, standNode, make("span", `stop ${index.stop[n]}`, index.stop[n]), size, last);
    node.addEventListener("click", () => open(n));
    return node;
  }
  function keepTicks() {
    model.set("selected", [...state.selected].sort((a, b) => a - b));
    model.save_changes();
    count();
  }
  list.addEventListener("scroll", () => { frame = frame || requestAnimationFrame(paint); }, { passive: true });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    let at = state.rows.findIndex((row) => row.number !== undefined && row.number === state.at);
    do at += step; while (at >= 0 && at < state.rows.length && state.rows[at].number === undefined);
    if (at < 0 || at >= state.rows.length) return;
    const top = at * state.height, bottom = top + state.height;
    if (top < list.scrollTop) list.scrollTop = top;
    if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    open(state.rows[at].number);
  });

  // One trajectory, or several ---------------------------------------------------------------------
  function open(number, whole = false) {
    state.at = number;
    redraw();
    const show = (values) => { state.showing = { kind: "one", values }; draw(); };
    const key = `${number}${whole ? "w" : ""}`;
    if (state.kept.has(key)) return show(state.kept.get(key));
    ask("trajectory", { number, whole }, ({ trajectory }) => {
      if (state.kept.size > 40) state.kept.clear(); // some may be of megabytes
      state.kept.set(key, trajectory);
      if (state.at === number) show(trajectory);
    });
  }
  function compare(what, title) {
    ask("compare", what, ({ trajectories, left_out }) => {
      const best = trajectories.reduce((top, one, at) => (rank(one) > rank(trajectories[top]) ? at : top), 0);
      state.showing = { kind: "many", trajectories, left_out, reference: best, title };
      draw();
    });
  }
  const rank = (one) => state.index.height[one.number] ?? -1;
  function draw() {
    const { showing } = state;
    if (!showing) return;
    const tools = make("div", "tools");
    const all = showing.kind === "one" ? [showing.values] : showing.trajectories;
    const hasRatio = all.some((values) => values.histories.flat().some((message) => message.tokens && message.tokens.ratios));
    tools.append(make("span", "", "tokens by"));
    for (const [name, { label, title }] of Object.entries(COLOURINGS)) {
      const node = button(label, title, () => { state.colouring = name; draw(); }, name === state.colouring ? "on" : "");
      if (name === "ratio" && !hasRatio) { node.disabled = true; node.title = "not known: the trainer's log-probs of these tokens were not kept"; }
      tools.append(node);
    }
    const colouring = state.colouring === "ratio" && !hasRatio ? "text" : state.colouring;
    tools.append(legend(colouring));
    if (showing.kind === "one") {
      const values = showing.values;
      if (state.index.groups[values.group].members.length > 1) tools.append(button("side by side", "the group's trajectories next to each other", () => compare({ group: values.group }, `group ${values.group}`)));
      detail.replaceChildren(tools, trajectoryView(values, `group ${values.group} · trajectory ${values.index}`, { colouring, whole: () => open(values.number, true) }));
    } else {
      tools.append(make("b", "", showing.title));
      if (showing.left_out) tools.append(make("span", "note", `${showing.left_out} more are not shown`));
      detail.replaceChildren(tools, compareView(showing.trajectories, showing.reference, { colouring }, (at) => { showing.reference = at; draw(); }));
    }
    detail.scrollTop = 0;
  }

  // Ticks and download ----------------------------------------------------------------------------
  const download = button("download", "as JSON lines, complete with token ids and log-probs", () => {
    const parts = [];
    say("preparing the download …");
    ask("export", { numbers: [...state.selected].sort((a, b) => a - b) }, (answer, buffers) => {
      parts.push(...buffers);
      if (!answer.done) return true;
      const link = make("a");
      link.href = URL.createObjectURL(new Blob(parts, { type: "application/x-ndjson" }));
      link.download = answer.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      say(`${answer.name}: ${answer.count.toLocaleString()} trajectories`);
      return false;
    });
  });
  const tickShown = button("tick shown", "tick all that pass the filters", () => { for (const number of state.numbers) state.selected.add(number); keepTicks(); redraw(); });
  const untick = button("untick", "remove all ticks", () => { state.selected.clear(); keepTicks(); redraw(); });
  const compareTicked = button("compare ticked", "the ticked trajectories next to each other", () => { if (state.selected.size) compare({ numbers: [...state.selected].sort((a, b) => a - b) }, `${state.selected.size} ticked`); });
  status.append(said, tickShown, untick, compareTicked, download);

  // Coming and going ------------------------------------------------------------------------------
  function opened(index) {
    Object.assign(state, { index, query: {}, at: null, showing: null, selected: new Set(index.selected), numbers: index.group.map((_, n) => n) });
    for (const kept of [state.standings, state.kept, state.closed, state.wanted]) kept.clear();
    drawBar();
    arrange();
    if (index.group.length) open(0);
    else detail.replaceChildren(make("div", "note", "There are no trajectories."));
  }
  function ticksChanged() {
    state.selected = new Set(model.get("selected"));
    if (state.index) { redraw(); count(); }
  }
  detail.replaceChildren(...(model.get("preview") || []).map((values) => trajectoryView(values, values.title, { colouring: "text" })));
  function fit() {
    if (!list.clientHeight) return; // hidden
    root.classList.toggle("narrow", root.clientWidth < NARROW);
    const height = list.clientWidth < ONE_LINE ? TALL : ROW;
    root.classList.toggle("tall", height === TALL);
    const first = list.scrollTop / state.height;
    const changed = height !== state.height;
    state.height = height;
    state.sight = list.clientHeight; // measured here alone: where an observer calls, the layout is the one that is seen
    if (!state.index) return;
    if (!changed) return paint();
    arrange();
    list.scrollTop = first * height; // the same row stays the first
  }
  const hidden = document.createElement("style"); // while the widget is seen, the static HTML below it is not
  hidden.textContent = `.${CSS.escape(model.get("static_class"))} { display: none; }`;
  document.head.append(hidden);
  const sizes = new ResizeObserver(fit);
  sizes.observe(root);
  model.on("msg:custom", received);
  model.on("change:selected", ticksChanged);
  ask("index", {}, opened);
  return () => {
    sizes.disconnect();
    hidden.remove();
    model.off("msg:custom", received);
    model.off("change:selected", ticksChanged);
    clearTimeout(soon);
    clearTimeout(state.later);
  };
}

export default { render };
