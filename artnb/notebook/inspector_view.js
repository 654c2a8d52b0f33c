// Draws one trajectory, or several side by side, from the values that trajectory_view.py sends.
// Every text of a model, user or tool goes through textContent: there is no innerHTML here, so HTML stays text.

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function button(text, title, onClick, className = "") {
  const node = make("button", className, text);
  node.type = "button";
  node.title = title;
  node.addEventListener("click", onClick);
  return node;
}

/** A text of a message: its own direction (RTL), line breaks kept. */
function prose(text, className = "text") {
  const node = make("div", className, text);
  node.dir = "auto";
  return node;
}

/** Content that is made when it is unfolded for the first time. */
function fold(title, fill, className = "fold") {
  const node = make("details", className);
  node.append(make("summary", "", title));
  let filled = false;
  node.addEventListener("toggle", () => {
    if (node.open && !filled) {
      filled = true;
      node.append(fill());
    }
  });
  return node;
}

function signed(value, digits = 3) {
  if (value === null || value === undefined) return "unknown";
  const text = Math.abs(value).toPrecision(digits).replace(/\.?0+$/, (end) => (end[0] === "." ? "" : end));
  return `${value < 0 ? "−" : "+"}${text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text}`;
}

function decimal(value) {
  return value === null || value === undefined ? "unknown" : String(+value.toFixed(4)).replace("-", "−");
}

// Tokens ------------------------------------------------------------------------------------------

const COLOURINGS = {
  text: { label: "Text", title: "messages as text, tokens not coloured" },
  advantage: { label: "Advantage", title: "blue: made more likely; orange: made less likely; stronger: by more" },
  logprob: { label: "Log-prob", title: "the darker, the less likely the sampler found the token" },
  ratio: { label: "Ratio", title: "trainer's probability over the sampler's: blue above 1, orange below" },
};

/** [colour variable, strength 0…1] of a token. */
function tint(colouring, advantage, logprob, ratio) {
  if (colouring === "advantage") return advantage === null ? null : [advantage < 0 ? 1 : 0, Math.min(1, Math.abs(advantage) / 2)];
  if (colouring === "logprob") return logprob === null ? null : [4, Math.min(1, -logprob / 5)];
  if (ratio === null || ratio === undefined) return null;
  return [ratio < 1 ? 1 : 0, Math.min(1, Math.abs(Math.log(ratio)) / 0.5)];
}

function tokenStream(tokens, colouring, advantage) {
  const stream = make("div", "text tokens");
  stream.dir = "auto";
  tokens.texts.forEach((text, at) => {
    const id = at < tokens.ids.length ? tokens.ids[at] : "unknown";
    const ratio = tokens.ratios ? tokens.ratios[at] : null;
    const facts = [`id ${id}`, `log-prob ${decimal(tokens.logprobs[at])}`];
    if (advantage !== null) facts.push(`advantage ${signed(advantage)}`);
    if (ratio !== null) facts.push(`ratio ${decimal(ratio)}`);
    if (!text) facts.push("part of the character that a later token ends");
    const node = make("span", text ? "token" : "token part", text || "▫");
    node.title = facts.join(" · ");
    const shade = tint(colouring, advantage, tokens.logprobs[at], ratio);
    if (shade) {
      const percent = Math.round(8 + 62 * shade[1]);
      node.style.backgroundColor = `color-mix(in srgb, var(--artnb-c${shade[0]}) ${percent}%, transparent)`;
    }
    stream.append(node);
  });
  const left = tokens.count - tokens.texts.length;
  if (left > 0) stream.append(make("span", "note", ` … ${left.toLocaleString()} more tokens`));
  return stream;
}

function legend(colouring) {
  const node = make("span", "legend");
  const ends = { advantage: ["less likely", 1, "more likely", 0], logprob: ["certain", null, "unlikely (e⁻⁵)", 4], ratio: ["below 1", 1, "above 1", 0] }[colouring];
  if (!ends) return node;
  const shade = (at) => (at === null ? "transparent" : `color-mix(in srgb, var(--artnb-c${at}) 70%, transparent)`);
  const strip = make("span", "strip");
  strip.style.background = `linear-gradient(to right, ${shade(ends[1])}, transparent${ends[1] === null ? "" : " 50%"}, ${shade(ends[3])})`;
  node.append(make("span", "", ends[0]), strip, make("span", "", ends[2]));
  return node;
}

// Messages ----------------------------------------------------------------------------------------

const STATES = { trained: "trained", sampled: "sampled, not trained", context: "context" };

/** One message. `show`: {colouring, advantage, whole(), standing known?, other: the message to compare with}. */
function bubble(message, show) {
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const node = make("div", `bubble ${role} ${show.plain && message.state === "trained" ? "sampled" : message.state}`);
  const head = make("div", "head");
  head.append(make("b", "", message.role));
  if (message.name) head.append(make("span", "", message.name));
  const state = show.plain && message.state === "sampled" ? "sampled" : STATES[message.state];
  const tag = make("span", `tag ${message.state}`, state);
  if (message.tokens && message.tokens.problem) tag.title = message.tokens.problem;
  head.append(tag);
  if (message.tokens) head.append(make("span", "", `${message.tokens.count.toLocaleString()} tokens`));
  if (message.finish) head.append(make("span", message.finish === "length" ? "warn" : "", message.finish === "length" ? "cut by max_tokens" : message.finish));
  node.append(head);
  const coloured = show.colouring !== "text" && message.tokens && message.tokens.texts.length;
  const { other } = show;
  if (message.reasoning && !coloured) {
    const differs = other && other.reasoning !== message.reasoning;
    node.append(fold(differs ? "reasoning ◆ differs" : "reasoning", () => (differs ? marked(message.reasoning, other.reasoning) : prose(message.reasoning)), "fold reasoning"));
  }
  if (coloured) node.append(tokenStream(message.tokens, show.colouring, message.state === "trained" ? show.advantage : null));
  else if (message.role === "tool" && message.text.length > 160 && !other) node.append(fold(`result: ${message.text.slice(0, 80).replace(/\s+/g, " ")}…`, () => prose(message.text)));
  else if (message.text) node.append(other ? marked(message.text, other.text) : prose(message.text));
  message.calls.forEach((call, at) => {
    const before = other && (other.calls[at] || { name: "", arguments: "" });
    const differs = before && (before.name !== call.name || before.arguments !== call.arguments);
    const inside = () => (differs ? marked(call.arguments, before.arguments, "text code") : prose(call.arguments, "text code"));
    const folded = fold(`calls ${call.name}${differs ? " ◆ differs" : ""}`, inside, "fold call");
    folded.open = Boolean(differs);
    node.append(folded);
  });
  if (message.missing) {
    const more = make("div", "note", `${message.missing.toLocaleString()} characters are not shown `);
    if (show.whole) more.append(button("show all", "fetch the whole trajectory", show.whole));
    node.append(more);
  }
  return node;
}

function facts(pairs, className) {
  const node = make("div", `facts ${className}`);
  for (const [name, value] of pairs) {
    const fact = make("span", "fact");
    fact.append(make("span", "name", name), make("span", "value", value));
    node.append(fact);
  }
  return node;
}

function standing(values) {
  if (values.trained === null || values.trained === undefined) return make("div", "standing");
  if (!values.trained) return make("div", "standing not", `○ Not trained: ${values.reason || "no reason is known"}`);
  if (values.reason) return make("div", "standing yes", `● Trained (${values.reason})`);
  const rows = values.rows > 1 ? ` in ${values.rows} rows: its history was rewritten between turns` : "";
  return make("div", "standing yes", `● Trained with advantage ${signed(values.advantage)}${rows}`);
}

function heading(values, title) {
  const node = make("div", "heading");
  const line = make("div", "line");
  line.append(make("b", "", title), make("span", "reward", `reward ${values.reward}`));
  line.append(make("span", "stop", values.stop === "none" ? "no stop reason" : values.stop));
  node.append(line, standing(values));
  if (values.metrics.length) node.append(facts(values.metrics, "metrics"));
  if (values.metadata.length) node.append(facts(values.metadata, "metadata"));
  if (values.error) node.append(fold(`error: ${values.error.title}`, () => prose(values.error.traceback, "text code"), "fold error"));
  if (values.logs.length) node.append(fold(`${values.logs.length} log lines`, () => prose(values.logs.join("\n"), "text code")));
  return node;
}

/** A whole trajectory. `show` as for `bubble`. */
function trajectoryView(values, title, show) {
  const node = make("div", "trajectory");
  node.append(heading(values, title));
  const sight = { ...show, advantage: values.advantage ?? null, plain: values.trained === null || values.trained === undefined };
  values.histories.forEach((messages, at) => {
    if (at) node.append(make("div", "note", `further history ${at}`));
    for (const message of messages) node.append(bubble(message, sight));
    if (!messages.length) node.append(make("div", "note", "no messages"));
  });
  return node;
}

// Side by side ------------------------------------------------------------------------------------

function words(text) {
  if (typeof Intl !== "undefined" && Intl.Segmenter) return [...new Intl.Segmenter(undefined, { granularity: "word" }).segment(text)].map((part) => part.segment);
  return text.split(/(\s+)/).filter(Boolean);
}

/** Which words of `mine` are not in `theirs`, in order: longest common subsequence, of the part that differs. */
function differing(mine, theirs) {
  let start = 0;
  while (start < mine.length && start < theirs.length && mine[start] === theirs[start]) start++;
  let end = 0;
  while (end < mine.length - start && end < theirs.length - start && mine[mine.length - 1 - end] === theirs[theirs.length - 1 - end]) end++;
  const a = mine.slice(start, mine.length - end);
  const b = theirs.slice(start, theirs.length - end);
  const flags = mine.map((_, at) => at >= start && at < mine.length - end);
  if (!a.length || a.length * b.length > 400000) return flags; // too long to align: the whole middle is marked
  const width = b.length + 1;
  const common = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) { flags[start + i] = false; i++; j++; }
    else if (common[(i + 1) * width + j] >= common[i * width + j + 1]) i++;
    else j++;
  }
  return flags;
}

function marked(text, other, className = "text") {
  const node = prose("", className);
  const mine = words(text);
  const flags = differing(mine, words(other));
  for (let from = 0; from < mine.length; ) {
    let to = from;
    while (to < mine.length && flags[to] === flags[from]) to++;
    node.append(make(flags[from] ? "mark" : "span", "", mine.slice(from, to).join("")));
    from = to;
  }
  return node;
}

function sameMessage(a, b) {
  return Boolean(b) && a.role === b.role && a.text === b.text && a.reasoning === b.reasoning && JSON.stringify(a.calls) === JSON.stringify(b.calls);
}

/** Columns of one group; differences from the column `reference` are marked, what is the same is one dim line. */
function compareView(trajectories, reference, show, onReference) {
  const node = make("div", "columns");
  const base = trajectories[reference];
  const order = [reference, ...trajectories.keys()].filter((at, place) => at !== reference || !place);
  order.forEach((at) => {
    const values = trajectories[at];
    const column = make("div", `column${at === reference ? " reference" : ""}`);
    const top = heading({ ...values, metadata: [] }, `trajectory ${values.index}`);
    if (at === reference) top.append(make("span", "tag", "the others are compared with this one"));
    else top.append(button("compare with this", "mark the differences from this trajectory", () => onReference(at)));
    column.append(top);
    let first = true;
    values.histories.forEach((messages, history) => messages.forEach((message, turn) => {
      const other = (base.histories[history] || [])[turn];
      if (at === reference) column.append(bubble(message, { ...show, advantage: values.advantage ?? null }));
      else if (sameMessage(message, other)) {
        column.append(fold(`${message.role}: the same`, () => bubble(message, { ...show, advantage: values.advantage ?? null }), "fold same"));
      } else {
        if (first) column.append(make("div", "first", "◆ first difference"));
        first = false;
        const against = other && other.role === message.role ? other : { text: "", reasoning: "", calls: [] };
        const drawn = bubble(message, { ...show, advantage: values.advantage ?? null, other: against });
        drawn.classList.add("differs");
        column.append(drawn);
      }
    }));
    if (at !== reference && first) column.append(make("div", "note", "no message differs"));
    node.append(column);
  });
  return node;
}
