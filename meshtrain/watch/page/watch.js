"use strict";
const EVERY_MS = 2000, W = 480, H = 220, LEFT = 56, BOTTOM = 24, TOP = 8, RIGHT = 8;
const COLORS = ["#3b7dd8", "#d8662b", "#2f9e5c", "#a04fc4", "#c23b5b", "#8a7a1f", "#1f9aa0", "#7a7a7a"];
const PHASES = ["data", "forward", "backward", "communication", "optimizer"];
const CHARTS = [
  ["loss", ["loss", "eval_loss"], ""], ["throughput", ["tokens_per_s"], "tokens/s (a classifier: samples/s)"],
  ["MFU", ["mfu", "mfu_causal"], ""], ["goodput", ["goodput"], ""],
  ["memory", ["memory_gib", "memory_max_gib", "memory_reserved_gib"], "GiB"], ["step time", ["step_time_s"], "s"],
];
const find = (id) => document.getElementById(id);
let runs = [], answers = "", chosen = 0, drawing = false, reading = null;  // reading: {of: a figure's title, at: number of a point or rank}

function make(name, attributes = {}, ...children) {
  const own = ["svg", "path", "line", "text", "rect", "title", "g"].includes(name);
  const node = own ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "own") node.style.setProperty("--own", value);
    else if (key === "flex") { node.style.flex = value[0]; node.style.background = value[1]; }
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function text(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en");
  return size >= 0.001 ? value.toPrecision(4).replace(/\.?0+$/, "") : value === 0 ? "0" : value.toExponential(2);
}
const share = (value) => value === null || value === undefined ? "-" : (100 * value).toFixed(1) + " %";
function seconds(value) {
  if (value === null || value === undefined) return "-";
  const whole = Math.round(value), h = Math.floor(whole / 3600), m = Math.floor(whole % 3600 / 60);
  return h ? `${h}h${String(m).padStart(2, "0")}m` : m ? `${m}m${String(whole % 60).padStart(2, "0")}s` : `${value.toFixed(1)} s`;
}
function ticks(low, high) {
  const raw = (high - low) / 5 || Math.abs(high) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999), marks = [];
  const first = Math.ceil(low / step);
  for (let i = 0; i <= 20; i++) {  // counted: added to a large number, a small step may change nothing
    const mark = (first + i) * step;
    if (mark > high + step * 1e-9) break;
    if (mark !== marks[marks.length - 1]) marks.push(mark);
  }
  return marks;
}

function curves(fields) {
  const first = Number(find("from").value) || 0, made = [];
  runs.forEach((run, number) => fields.forEach((field, nth) => {
    const column = run && run.columns[field];
    if (!column || (nth > 1 && runs.length > 1)) return;
    const points = run.step.map((step, i) => [step, column[i]]).filter(([step, y]) => y !== null && y !== undefined && step >= first);
    if (points.length) made.push({run, number, field, nth, points});
  }));
  return made;
}
function readable(figure, svg, title, count, columns, show, pointed) {  // values by pointer, finger and arrows
  const go = (to) => {
    reading = to === null ? null : {of: title, at: Math.min(count - 1, Math.max(0, to))};
    show(reading && reading.at);
  };
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => {
    const to = pointed(event);
    if (to !== null) go(to);
  });
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") go(null); });
  figure.addEventListener("blur", () => { if (!drawing) go(null); });  // not where a new figure takes its place
  figure.addEventListener("keydown", (event) => {
    const here = reading?.of === title ? reading.at : count, rows = columns > 1 && {ArrowUp: here - columns, ArrowDown: here + columns};
    const to = {ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: count - 1, ...rows}[event.key];
    if (to !== undefined) { go(to); event.preventDefault(); }
    if (event.key === "Escape") go(null);
  });
  if (reading?.of === title) go(reading.at);
}
function chart(title, fields, unit) {
  const made = curves(fields), figure = make("figure", {tabindex: 0, "data-chart": title});
  const dashed = [...new Set(made.filter((curve) => curve.nth).map((curve) => ["", "dashed: ", "dotted: "][curve.nth] + curve.field))];
  const legend = [unit, ...dashed].filter(Boolean).join("; "), output = make("output", {}, legend);
  figure.append(make("figcaption", {}, make("strong", {}, title), output));
  if (!made.length) { figure.append(make("p", {class: "nothing"}, "no value yet")); return figure; }
  const log = title === "loss" && find("log").checked, scale = (y) => log ? Math.log10(Math.max(y, 1e-12)) : y;
  const xs = made.flatMap((curve) => curve.points.map((point) => point[0]));
  const ys = made.flatMap((curve) => curve.points.map((point) => scale(point[1])));
  const reduce = (f, values) => values.reduce((a, b) => f(a, b));
  let [x0, x1, y0, y1] = [reduce(Math.min, xs), reduce(Math.max, xs), reduce(Math.min, ys), reduce(Math.max, ys)];
  if (find("zero").checked && !log) y0 = Math.min(0, y0);
  if (y1 === y0) { y0 -= Math.abs(y0) * 0.05 || 0.5; y1 += Math.abs(y1) * 0.05 || 0.5; }
  const x = (v) => LEFT + (x1 === x0 ? 0.5 : (v - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const y = (v) => TOP + (y1 - scale(v)) / (y1 - y0) * (H - TOP - BOTTOM);
  const svg = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} over steps ${x0} to ${x1}`});
  for (const mark of ticks(y0, y1)) {
    const value = log ? 10 ** mark : mark, height = y(value);
    svg.append(make("line", {class: "grid", x1: LEFT, x2: W - RIGHT, y1: height, y2: height}),
               make("text", {x: LEFT - 6, y: height + 4, "text-anchor": "end"}, text(value)));
  }
  for (const mark of ticks(x0, x1).filter(Number.isInteger))
    svg.append(make("text", {x: x(mark), y: H - 6, "text-anchor": "middle"}, text(mark)));
  svg.append(make("text", {x: LEFT - 6, y: H - 6, "text-anchor": "end"}, "step"));
  for (const curve of made) {
    const line = curve.points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const one = curve.points.length === 1 ? "h.01" : "";
    svg.append(make("path", {d: line + one, stroke: COLORS[curve.number % COLORS.length], "stroke-linecap": "round",
      "stroke-dasharray": ["", "5 3", "2 3"][curve.nth] || ""}, make("title", {}, `${curve.run.name}: ${curve.field}`)));
  }
  const mark = make("line", {class: "at", x1: -9, x2: -9, y1: TOP, y2: H - BOTTOM});
  svg.append(mark);
  const steps = made.reduce((a, b) => b.points.length > a.points.length ? b : a).points.map((point) => point[0]);
  const nearest = (all, of, step) => all.reduce((a, b) => Math.abs(of(b) - step) < Math.abs(of(a) - step) ? b : a);
  const show = (number) => {
    const step = number === null ? null : steps[number];
    for (const end of ["x1", "x2"]) mark.setAttribute(end, step === null ? -9 : x(step));
    output.textContent = step === null ? legend : `step ${text(step)}: ` + made.map((curve) => (runs.length > 1 ? curve.run.name + " " : "") +
      (fields.length > 1 ? curve.field + " " : "") + text(nearest(curve.points, (point) => point[0], step)[1])).join(", ");
  };
  figure.append(svg);
  readable(figure, svg, title, steps.length, 1, show, (event) => {
    const box = svg.getBoundingClientRect(), across = (event.clientX - box.left) / box.width * W;
    const step = x0 + (across - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
    return nearest([...steps.keys()], (number) => steps[number], step);
  });
  return figure;
}

function bar(id, parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0), whole = total > 0;
  find(id).replaceChildren(...parts.map(([name, value], i) =>
    make("div", {flex: [whole ? value / total : 0, COLORS[i % COLORS.length]], title: `${name}: ${seconds(value)}`})));
  find(id + "-legend").replaceChildren(...(whole ? parts.filter(([, value]) => value > 0).map(([name, value]) =>
    make("li", {own: COLORS[parts.findIndex((part) => part[0] === name) % COLORS.length]}, `${name} ${share(value / total)}`)) : [make("li", {own: "transparent"}, "not known yet")]));
}
function mesh(told) {  // columns: the inner axes, as many ranks as fit; the axes that are left go down
  const names = Object.keys(told.axes), sizes = Object.values(told.axes), world = told.own_time_s.length, most = innerWidth < 600 ? 8 : 32;
  let columns = 1;
  for (let i = sizes.length - 1; i >= 0 && (columns === 1 || world / columns > columns); i--) {
    let part = sizes[i];
    while (part > 1 && (sizes[i] % part || columns * part > most)) part--;
    columns *= part;
    if (part < sizes[i]) break;
  }
  const inner = sizes.map((_, i) => sizes.slice(i + 1).reduce((a, b) => a * b, 1));
  const place = (rank, from = 1) => names.flatMap((name, i) => inner[i] * sizes[i] > from ? [`${name} ${Math.floor(rank / inner[i]) % sizes[i]}`] : []).join(", ");
  return {columns, rows: Math.ceil(world / columns), place};
}
function heat(run) {
  const told = run.ranks, field = find("ranks");
  if (!told) return field.replaceChildren(make("p", {class: "nothing"}, "the ranks are compared every 20 steps: nothing yet"));
  const {columns, rows, place} = mesh(told), cell = Math.max(16, Math.min(44, 900 / columns)), left = rows > 1 ? 120 : 0;
  const draw = (title, values, unit) => {
    const low = Math.min(...values), high = Math.max(...values), svg = make("svg", {viewBox: `0 0 ${left + columns * cell} ${rows * cell}`, role: "img",
      "aria-label": `${title} of each rank: ${text(low)} to ${text(high)} ${unit}`});
    svg.style.maxWidth = `${left + columns * cell}px`;
    const cells = values.map((value, rank) => {  // as warm as it is above the lowest; a quarter more is the warmest
      const warm = Math.min(1, Math.max(0, value / low - 1 || 0) / 0.25), column = rank % columns, row = Math.floor(rank / columns);
      if (left && !column) svg.append(make("text", {x: left - 6, y: (row + 0.5) * cell + 4, "text-anchor": "end"}, place(rank, columns)));
      const rect = make("rect", {x: left + column * cell + 1, y: row * cell + 1, width: cell - 2, height: cell - 2, "data-rank": rank,
        fill: `color-mix(in oklab, #cfe0f7, #c8501b ${Math.round(100 * warm)}%)`});
      svg.append(rect);
      if (cell >= 30) svg.append(make("text", {class: "rank", x: left + (column + 0.5) * cell, y: (row + 0.5) * cell + 4, "text-anchor": "middle"}, String(rank)));
      return rect;
    });
    const legend = `${text(low)} to ${text(high)} ${unit}, step ${text(told.step)}`, output = make("output", {}, legend);
    const figure = make("figure", {tabindex: 0, "data-chart": title}, make("figcaption", {}, make("strong", {}, title), output), svg);
    readable(figure, svg, title, values.length, columns, (rank) => {
      cells.forEach((rect, number) => rect.classList.toggle("at", number === rank));
      output.textContent = rank === null ? legend : `rank ${rank} (${place(rank)}) ${told.hosts[rank] ?? ""}: ${text(values[rank])} ${unit}`;
    }, (event) => event.target.dataset.rank === undefined ? null : Number(event.target.dataset.rank));
    return figure;
  };
  field.replaceChildren(make("p", {class: "nothing"}, "orange: 25 % and more above the lowest"),
    draw("own time of a step", told.own_time_s, "s"), draw("memory of a rank", told.memory_gib, "GiB"));
}
function timeline(run) {
  const told = run.timeline, field = find("timeline");
  if (!told) return field.replaceChildren(make("p", {class: "nothing"}, "none was recorded: metrics.timeline=STEP records one"));
  const height = 22, left = 40, wide = 900, svg = make("svg", {viewBox: `0 0 ${wide} ${told.ranks * height}`, role: "img",
    "aria-label": `${told.title}: idle ${share(told.idle_share)}`});
  told.events.forEach((row, rank) => {
    svg.append(make("text", {x: 0, y: rank * height + 15}, `pp ${rank}`));
    for (const event of row) {
      const kind = event.action.replace(/[^A-Za-z]/g, ""), color = {F: COLORS[0], B: COLORS[2], I: COLORS[2], W: COLORS[5]}[kind] || COLORS[7];
      const start = left + event.start / told.makespan * (wide - left);
      svg.append(make("rect", {x: start, y: rank * height + 2, height: height - 4, fill: color,
        width: Math.max(0.5, (event.end - event.start) / told.makespan * (wide - left) - 0.5)}, make("title", {}, `${event.action}: ${text(event.end - event.start)} ${told.unit}`)));
    }
  });
  field.replaceChildren(make("p", {class: "nothing"}, `${told.title}: ${text(told.makespan)} ${told.unit}, idle ${share(told.idle_share)}`),
    make("div", {class: "scroll", tabindex: 0, "aria-label": "timeline"}, svg),
    make("ul", {class: "legend"}, ...[["forward", 0], ["backward", 2], ["weight gradient", 5]].map(([name, i]) => make("li", {own: COLORS[i]}, name))));
}
function events(run) {
  const says = {started: (value) => "a job started, " + new Date(value * 1000).toLocaleString(), saved: () => "checkpoint", end: (value) => `the job ended: ${value}`};
  const rows = [...run.events].reverse().map((event) => [event.step, says[event.kind](event.value)]);
  find("events").replaceChildren(make("tr", {}, make("th", {}, "step"), make("th", {}, "what")),
    make("tr", {}, make("td", {}, ""), make("td", {}, `checkpoints in the run's folder: ${run.checkpoints.join(", ") || "none"}`)),
    ...(run.failures.length ? [make("tr", {}, make("td", {}, ""), make("td", {}, `evidence of failures: ${run.failures.join(", ")}`))] : []),
    ...rows.map(([step, what]) => make("tr", {}, make("td", {}, String(step)), make("td", {}, what))));
}
function state(run) {
  if (run.exit) return `${run.exit.status}: ${run.exit.reason}`;
  if (!run.rows) return "starting";
  const late = run.age_s > Math.max(60, 10 * (run.newest.step_time_s || 0));
  return `${late ? "silent" : "training"}, the last row ${seconds(Math.max(0, run.age_s))} ago`;
}
function facts(run) {
  const now = run.newest, last = (name) => (run.columns[name] || []).filter((value) => value !== null).at(-1);
  return [["step", text(run.step.at(-1))], ["loss", text(now.loss)], ["evaluation", text(last("eval_loss"))], ["learning rate", text(now.lr)],
    ["gradient norm", text(now.grad_norm)], ["throughput", text(now.tokens_per_s) + " /s"], ["step time", text(now.step_time_s) + " s"], ["MFU", share(now.mfu)],
    ["goodput", share(now.goodput)], ["memory", text(now.memory_gib) + " GiB"], ["wall time", seconds(now.wall_s)], ["checkpoints", String(run.checkpoints.length)],
    ["layout", run.layout.replace(/^layout /, "") || "-"], ["state", state(run)],
    ...(run.bad_lines ? [["lines left out", `${run.bad_lines} that are no rows`]] : []),
    ...(run.left_out ? [["fields left out", `${run.left_out}, beyond the first 500`]] : [])];
}
function numbers(run) {
  const card = ([name, value], wide) => make("div", wide ? {class: "wide"} : {}, make("dt", {}, name), make("dd", {}, value));
  const list = facts(run), alone = runs.length === 1, all = alone ? [] : runs.map((one) => Object.fromEntries(facts(one)));
  find("numbers").replaceChildren(...(alone ? list.map((fact, i) => card(fact, i > 11)) : []));
  find("beside").replaceChildren(...(alone ? [] : [make("tr", {}, make("td"), ...runs.map((one) => make("th", {}, one.name))),
    ...list.map(([name]) => make("tr", {}, make("th", {}, name), ...all.map((of) => make("td", {}, of[name] ?? "-"))))]));
}
function fields() {
  const known = [...new Set(runs.flatMap((run) => run ? Object.keys(run.columns) : []))].sort(), select = find("field");
  if (known.length === select.options.length) return;
  const before = select.value || "grad_norm";
  select.replaceChildren(...known.map((name) => make("option", {}, name)));
  select.value = known.includes(before) ? before : known[0];
}
function draw() {
  const run = runs[chosen];
  if (!run) return;
  fields();
  const focused = document.activeElement?.dataset?.chart, extra = find("field").value;
  drawing = true;
  find("charts").replaceChildren(...CHARTS.map((one) => chart(...one)), ...(extra ? [chart(extra, [extra], "")] : []));
  numbers(run); heat(run); timeline(run); events(run);
  if (focused) document.querySelector(`[data-chart="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
  drawing = false;
  const last = (name) => (run.columns[name] || []).filter((v) => v !== null).at(-1) || 0;
  const parts = PHASES.map((name) => [name, last(`time_${name}_s`)]), rest = last("step_time_s") - parts.reduce((sum, part) => sum + part[1], 0);
  bar("phases", [...parts, ["rest", Math.max(0, rest)]]);
  bar("wall", Object.keys(run.columns).filter((name) => name.startsWith("wall_") && name !== "wall_s").map((name) => [name.slice(5, -2), last(name)]));
}
async function poll() {
  try {
    const get = async (path) => { const answer = await fetch(path); if (!answer.ok) throw new Error(`status ${answer.status}`); return answer.text(); };
    const names = JSON.parse(await get("runs")), told = await Promise.all(names.map((_, i) => get(`runs/${i}`)));
    const before = answers;
    answers = told.join();
    runs = told.map((one) => JSON.parse(one));
    if (find("runs").children.length !== names.length)
      find("runs").replaceChildren(...names.map((name, i) => {
        const button = make("button", {own: COLORS[i % COLORS.length], "aria-pressed": String(i === chosen)}, name);
        button.addEventListener("click", () => {
          chosen = i;
          [...find("runs").children].forEach((other, n) => other.setAttribute("aria-pressed", String(n === chosen)));
          draw();
        });
        return button;
      }));
    find("state").textContent = `${new Date().toLocaleTimeString()}`;
    if (answers !== before) draw();
  } catch (error) {
    find("state").textContent = `no answer: ${error.message}`;
  }
  setTimeout(poll, EVERY_MS);
}
for (const id of ["log", "zero", "from", "field"]) find(id).addEventListener("change", draw);
poll();
