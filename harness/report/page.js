"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const specs = JSON.parse(document.getElementById("specs").textContent);
const MOST = 400;  // rows that a section shows before it is asked for more
const text = (name, at) => data.texts[data.words[name][at]];
const number = (name, at) => data.numbers[name][at];
const rounded = digits => new Intl.NumberFormat("en", {minimumFractionDigits: digits, maximumFractionDigits: digits,
  useGrouping: !digits, roundingMode: "halfEven"});  // as the tables round
const [whole, tenths, hundredths] = [0, 1, 2].map(rounded);
const MIB = 2 ** 20;
const mib = bytes => bytes == null ? "" : (bytes < 100 * MIB ? tenths : whole).format(bytes / MIB);
const times = value => value == null ? "" : `${hundredths.format(value)} x`;
const counted = count => `${count} round${count === 1 ? "" : "s"}`;

function time(at) {
  const [ratio, low, high] = ["time", "low", "high"].map(name => number(name, at));
  if (ratio == null) return "";
  if (low == null) return `${times(ratio)}, ${counted(number("rounds", at))}: open`;
  return `${times(ratio)} (${hundredths.format(low)}-${hundredths.format(high)}), ${text("word", at)}`;
}

function element(name, content, className) {
  const made = document.createElement(name);
  if (content != null) made.textContent = content;
  if (className) made.className = className;
  return made;
}

// What the table of a comparison shows of a row: the name of a column, its text, and the value that it is sorted by.
const COLUMNS = [
  ["strategy", at => text("strategy", at), at => text("strategy", at)],
  ["peak MiB", at => text("status", at) === "ok" ? mib(number("peak", at)) : text("status", at), at => number("peak", at)],
  ["memory", at => text("strategy", at) === "baseline" ? "" : [times(number("ratio", at)), text("memory", at)].filter(Boolean).join(", "),
    at => number("ratio", at)],
  ["as started", at => times(number("native", at)), at => number("native", at)],
  ["predicted", at => mib(number("predicted", at)), at => number("predicted", at)],
  ["at most", at => mib(number("atMost", at)), at => number("atMost", at)],
  ["residual", at => text("residual", at), at => number("residualRatio", at)],
  ["time", time, at => number("time", at)],
  ["answer", at => text("answer", at).replaceAll("_", " "), at => text("answer", at)],
  ["verdict", at => text("verdict", at), at => text("verdict", at)],
];
const SORTS = {strategy: "strategy", peak_bytes: "peak MiB", peak_ratio: "memory", native_peak_ratio: "as started",
  predicted_bytes: "predicted", at_most_bytes: "at most", residual_ratio: "residual", time_ratio: "time", answer: "answer", verdict: "verdict"};

const state = {words: "", place: "", against: "", answer: "", wins: false, sort: -1, down: false, open: new Set(), beside: []};
const searched = [];

function searchable(at) {
  searched[at] ??= ["suite", "comparison", "place", "strategy", "status", "answer", "verdict", "notes", "flags", "reasons"]
    .map(name => text(name, at)).join(" ").toLowerCase();
  return searched[at];
}

function matches(at, words) {
  return (!state.place || text("place", at) === state.place)
    && (!state.against || text("against", at).split("; ").includes(state.against))
    && (!state.answer || text("answer", at) === state.answer)
    && (!state.wins || ["wins", "enables"].includes(text("verdict", at)))
    && words.every(word => searchable(at).includes(word));
}

function ordered(rows) {
  if (state.sort < 0) return rows;
  const value = COLUMNS[state.sort][2];
  return rows.toSorted((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x == null || y == null) return (x == null) - (y == null);
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return state.down ? -order : order;
  });
}

// A row that was opened: what its peak is made of, its rounds, what decided its verdict, and the command.
function stacked(at) {
  const parts = data.composition[at] || [];
  if (!parts.length) return [];
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const bar = element("div", null, "bar"), key = element("ul", null, "key");
  for (const [name, size] of parts) {
    const phase = data.texts[name], colour = data.colours[phase] || "#b0b0b0", piece = element("span");
    piece.style.cssText = `background:${colour};width:${100 * size / total}%`;
    piece.title = `${phase}: ${mib(size)} MiB`;
    bar.append(piece);
    const line = element("li", `${phase} ${mib(size)} MiB`), mark = element("i");
    mark.style.background = colour;
    line.prepend(mark);
    key.append(line);
  }
  return [element("b", "What the peak is made of"), bar, key];
}

function dots(at) {
  const rounds = data.rounds[at] || [];
  if (!rounds.length) return [];
  const [partner, low, high] = [text("strategy", at) === "nothing" ? "baseline" : "mean of baseline and control", number("low", at), number("high", at)];
  const ends = [1, ...rounds, low ?? 1, high ?? 1];
  const least = Math.min(...ends), most = Math.max(...ends), room = Math.max(0.02, 0.08 * (most - least));
  const x = value => 10 + 380 * (value - least + room) / (most - least + 2 * room);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 400 48");
  svg.setAttribute("class", "rounds");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `step times of ${counted(rounds.length)}, each divided by the ${partner} of its round`);
  const draw = (name, attributes, content) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (content) made.textContent = content;
    svg.append(made);
  };
  draw("line", {x1: x(1), x2: x(1), y1: 2, y2: 32, stroke: "currentColor", "stroke-dasharray": "3 3"});
  draw("text", {x: x(1), y: 45, "text-anchor": x(1) < 90 ? "start" : x(1) > 310 ? "end" : "middle"}, partner);
  if (low != null) draw("line", {x1: x(low), x2: x(high), y1: 28, y2: 28, stroke: "var(--accent)", "stroke-width": 3});
  for (const [index, value] of rounds.entries())
    draw("circle", {cx: x(value), cy: 8 + 5 * (index % 3), r: 3, fill: "var(--accent)", "fill-opacity": 0.65});
  return [element("b", `Step times of ${counted(rounds.length)}${low == null ? "" : ", and the interval"}`), svg];
}

function bound(at) {
  const coverage = number("coverage", at);
  return coverage == null ? "" : `${mib(number("atMost", at))} MiB, with a probability of ${tenths.format(100 * coverage).replace(/\.0$/, "")} %`;
}

function facts(at) {
  const list = element("dl");
  const lines = [["status", text("status", at)], ["peak in", text("phase", at)], ["at most", bound(at)],
    ["host MiB", mib(number("host", at))], ["floor MiB", mib(number("floor", at))], ["against", text("against", at)],
    ["evidence", text("reasons", at)], ["answer", text("why", at)], ["notes", text("notes", at)], ["in your own code", text("elsewhere", at)], ["flags", text("flags", at)], ["machine", text("machine", at)], ["commit", text("commit", at)]];
  for (const [name, value] of lines) if (value) list.append(element("dt", name), element("dd", value));
  return list;
}

const quoted = word => /^[\w.\/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

function command(at) {
  // a part of a suite beside the whole of it
  return `harness run ${text("asked", at)} --place ${quoted(text("place", at))} -k ${quoted(text("strategy", at))} --results again`;
}

const besideWords = at => state.beside.includes(at) ? "Take away again" : "Lay beside another row";
const nameButtons = () => document.querySelectorAll("button[data-row]").forEach(button => { button.textContent = besideWords(Number(button.dataset.row)); });

function opened(at) {
  const made = element("tr", null, "more"), cell = element("td");
  cell.colSpan = COLUMNS.length;
  const beside = element("button", besideWords(at), "plain");
  beside.dataset.row = at;
  beside.addEventListener("click", () => { state.opener = beside; lay(at); });
  const again = element("p");
  again.append("Repeat it: ", element("code", command(at)));
  cell.append(...stacked(at), ...dots(at), facts(at), again, beside);
  made.append(cell);
  return made;
}

function closePanel() {
  state.beside = [];
  document.getElementById("beside").hidden = true;
  nameButtons();
  state.opener?.focus();  // or the place in the table would be lost
}

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && state.beside.length) closePanel();
});

function lay(at) {
  state.beside = state.beside.includes(at) ? state.beside.filter(each => each !== at) : [...state.beside, at].slice(-2);
  nameButtons();
  const panel = document.getElementById("beside");
  panel.hidden = !state.beside.length;
  const close = element("button", "Close", "plain"), table = element("table"), head = element("tr");
  close.addEventListener("click", closePanel);
  head.append(element("th", ""), ...state.beside.map(each => element("th", `${text("strategy", each)} - ${text("comparison", each)}`)));
  table.append(head);
  for (const [name, shown] of COLUMNS.slice(1)) {
    const line = element("tr");
    line.append(element("th", name), ...state.beside.map(each => element("td", shown(each))));
    table.append(line);
  }
  const bars = element("tr");
  bars.append(element("th", "made of"), ...state.beside.map(each => {
    const cell = element("td");
    cell.append(...stacked(each).slice(1), ...dots(each).slice(1));
    return cell;
  }));
  table.append(bars);
  panel.replaceChildren(close, state.beside.length < 2 ? element("p", "Choose a second row to lay beside this one.", "soft") : "", table);
}

function line(at) {
  const made = element("tr", null, "row");
  made.tabIndex = 0;
  made.setAttribute("aria-expanded", state.open.has(at));
  for (const [index, [name, shown]] of COLUMNS.entries()) {
    const cell = element("td", shown(at), index === 0 ? "strategy" : name === "verdict" ? text("verdict", at).split(",")[0] : "number");
    if (index === 0) cell.replaceChildren(...breakable(shown(at)));
    cell.dataset.label = name;
    made.append(cell);
  }
  const turn = () => {
    if (state.open.delete(at)) { made.nextSibling.remove(); } else { state.open.add(at); made.after(opened(at)); }
    made.setAttribute("aria-expanded", state.open.has(at));
  };
  made.addEventListener("click", turn);
  made.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); }
    const next = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (next) {
      const rows = [...made.closest("table").querySelectorAll("tr.row")], to = rows[rows.indexOf(made) + next];
      if (to) { event.preventDefault(); to.focus(); }
    }
  });
  return state.open.has(at) ? [made, opened(at)] : [made];
}

// A long name may be broken behind a joint, and nowhere else.
function breakable(name) {
  return name.split(/(?<=[_(])/).flatMap(piece => [piece, element("wbr")]);
}

// Every table is made anew: the same header has the focus again.
function sort(button, index) {
  const section = button.closest("details"), buttons = () => [...section.querySelectorAll(".rows th button")];
  const at = buttons().indexOf(button);
  [state.sort, state.down] = [index, state.sort === index && !state.down];
  show();
  buttons()[at]?.focus();
}

function table(rows) {
  const made = element("table", null, "cards"), head = element("tr");
  for (const [index, [name]] of COLUMNS.entries()) {
    const cell = element("th"), button = element("button", name);
    cell.scope = "col";
    if (state.sort === index) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    button.addEventListener("click", () => sort(button, index));
    cell.append(button);
    head.append(cell);
  }
  const top = element("thead"), body = element("tbody");
  top.append(head);
  body.append(...ordered(rows).flatMap(line));
  made.append(top, body);
  return made;
}

// The first comparisons, each whole, with as many rows as a section shows at once; at least one comparison.
function begun(groups) {
  let count = 0;
  return groups.filter(([, members], index) => (count += members.length) <= MOST || index === 0);
}

function fill(section, all = section.whole) {
  const room = section.querySelector(".rows"), rows = section.matched || [];
  if (!section.open) { room.replaceChildren(); section.filled = false; return; }
  const groups = new Map();
  for (const at of rows) {
    const name = text("comparison", at);
    groups.has(name) ? groups.get(name).push(at) : groups.set(name, [at]);
  }
  const shown = all ? [...groups] : begun([...groups]);
  room.replaceChildren(...shown.flatMap(([name, members]) => {
    const answer = data.answers[`${section.dataset.suite}\n${name}`];
    return [element("h3", name), ...(answer ? [element("p", answer)] : []), table(members)];
  }));
  if (shown.length < groups.size) {
    const more = element("button", `Show all ${rows.length} rows`, "plain");
    more.addEventListener("click", () => { section.whole = true; fill(section); });
    room.append(more);
  }
  section.filled = true;
  section.querySelectorAll("figure").forEach(draw);
}

const sections = [...document.querySelectorAll("details.suite")];
const bySuite = new Map(sections.map(section => [section.dataset.suite, section]));

function show() {
  const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
  const filtered = Boolean(words.length || state.place || state.against || state.answer || state.wins);
  for (const section of sections) section.matched = [];
  let count = 0;
  for (let at = 0; at < data.count; at++) {
    if (!matches(at, words)) continue;
    bySuite.get(text("suite", at)).matched.push(at);
    count++;
  }
  for (const section of sections) {
    section.hidden = filtered && !section.matched.length;
    section.querySelector(".count").textContent = filtered ? `${section.matched.length} of ${section.dataset.count} rows` : `${section.dataset.count} rows`;
    if (filtered && count <= MOST && section.matched.length) section.open = true;
    fill(section);
  }
  document.getElementById("count").textContent = `${count} of ${data.count} rows`;
}

function option(id, name) {
  const select = document.getElementById(id), known = new Set();
  for (let at = 0; at < data.count; at++) for (const each of text(name, at).split("; ")) if (each) known.add(each);
  for (const each of [...known].sort()) select.add(new Option(each.replaceAll("_", " "), each));
  select.addEventListener("change", () => { state[id] = select.value; show(); });
}

// A link leads to its suite: where the filters hide that, they are taken away.
function follow() {
  const section = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!section || !("open" in section)) return;
  if (section.hidden) {
    for (const control of [words, ...["place", "against", "answer"].map(id => document.getElementById(id))]) control.value = "";
    wins.checked = false;
    Object.assign(state, {words: "", place: "", against: "", answer: "", wins: false});
    show();
  }
  section.open = true;
  section.scrollIntoView();
}

const LEAST = 600;  // pixels that the letters of a picture need: a narrower figure scrolls

const dark = matchMedia("(prefers-color-scheme: dark)");
function draw(figure) {
  const spec = structuredClone((specs[figure.dataset.suite] || {})[figure.dataset.chart]);
  if (!spec || figure.drawn === dark.matches || !window.vegaEmbed) return;
  figure.drawn = dark.matches;
  const room = document.createElement("div"), across = Math.max(LEAST, figure.clientWidth);
  room.style.width = `${across}px`;
  figure.replaceChildren(room);
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), grid = style.getPropertyValue("--line");
  const words = {labelColor: ink, titleColor: ink};
  const config = {background: "transparent", axis: {...words, gridColor: grid, domainColor: grid, tickColor: grid},
    axisY: {labelLimit: 0.4 * across}, legend: {...words, labelLimit: 240}, text: {color: ink}, title: {color: ink, fontSize: 12, anchor: "start", limit: across}, view: {stroke: grid}};
  const named = figure.dataset.chart.startsWith("lengths");
  spec.width = named ? Math.max(140, across - 330) : "container";
  if (!named) spec.autosize = {type: "fit-x", contains: "padding"};
  vegaEmbed(room, spec, {config, actions: false, renderer: "svg", logLevel: 1}).catch(error => { figure.textContent = String(error); });
}

option("place", "place");
option("against", "against");
option("answer", "answer");
const words = document.getElementById("words"), wins = document.getElementById("wins");
words.addEventListener("input", () => { state.words = words.value; show(); });
wins.addEventListener("change", () => { state.wins = wins.checked; show(); });
for (const section of sections) section.addEventListener("toggle", () => { if (section.open !== Boolean(section.filled)) fill(section); });
addEventListener("hashchange", follow);
for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", () => { if (link.hash === location.hash) follow(); });
addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("details.fold")) fold.open = true; for (const section of sections) if (!section.hidden) { section.open = true; fill(section, true); } });
dark.addEventListener("change", () => document.querySelectorAll("figure").forEach(figure => { if (figure.offsetParent) draw(figure); }));

// A link can hold what is shown: page.html?filter=fused&place=torch/cpu&answer=bit_exact&wins&sort=peak_bytes&down&open
const asked = new URLSearchParams(location.search);
for (const [id, name] of [["words", "filter"], ["place", "place"], ["against", "against"], ["answer", "answer"]]) {
  const control = document.getElementById(id);
  control.value = asked.get(name) || "";
  if (control.selectedIndex < 0) control.value = "";  // what the link asks for is not here
  state[id] = control.value;
}
wins.checked = state.wins = asked.has("wins");
state.sort = COLUMNS.findIndex(([name]) => name === SORTS[asked.get("sort")]);
state.down = asked.has("down");
show();
if (asked.has("open")) {
  sections.filter(section => !section.hidden).forEach(section => { section.open = true; fill(section); });
  const first = document.querySelectorAll("tr.row")[Number(asked.get("open")) || 0];
  if (first) { first.click(); first.focus(); }
}
const beside = (asked.get("beside") || "").split(",").filter(each => /^\d+$/.test(each)).map(Number);
for (const at of new Set(beside)) if (at < data.count) lay(at);
document.querySelectorAll(".front figure").forEach(draw);
follow();
