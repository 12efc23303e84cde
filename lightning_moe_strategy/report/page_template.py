"""The page of a run without its numbers. Its style is the planner's, its script draws what was computed."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{{title}}</title>
<style>
{{style}}
.controls { grid-template-columns: minmax(0, 1fr); margin: 24px 0 16px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
.controls[hidden] { display: none; }
.wide { grid-column: 1 / -1; }
.figure { min-width: 0; }
.figure table { margin-top: 10px; border-collapse: collapse; font-size: 14px; }
.missing { align-self: start; border-style: dashed; }
.facts { overflow-wrap: anywhere; }
input[type=range]:focus-visible { outline: 2px solid var(--blue); outline-offset: 4px; border-radius: 4px; }
</style>
</head>
<body>
<header>
  <h1>{{title}}</h1>
  <p class="muted">a run of lightning_moe_strategy</p>
</header>
<p class="verdict" id="headline"></p>
<div class="cards" id="cards"></div>
<main>
  <section class="figures" id="training" aria-label="Training"></section>
  <section aria-label="Expert load">
    <div class="controls" id="controls" hidden>
      <label>Expert load in <output id="time-value" for="time"></output>
        <input type="range" id="time" min="0" step="1">
      </label>
    </div>
    <div class="figures" id="expert-load"></div>
  </section>
  <section class="facts"><h2>The run</h2><dl id="facts"></dl></section>
</main>
<noscript><p>The figures need JavaScript; nothing is loaded from a network.</p></noscript>
<script type="application/json" id="report">{{data}}</script>
<script>{{plotly}}</script>
<script>
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const time = document.getElementById("time");

function element(tag, parent, text, className) {
  const made = parent.appendChild(document.createElement(tag));
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function inTheme(figure) {
  const colors = report.themes[darkTheme.matches ? "dark" : "light"];
  return JSON.parse(JSON.stringify(figure).replace(/"@([a-z]+)"/g, (_, name) => JSON.stringify(colors[name])));
}

function table(card, block) {
  const made = element("table", card);
  const head = element("tr", element("thead", made));
  for (const cell of block.head) element("th", head, cell);
  const body = element("tbody", made);
  for (const cells of block.rows) {
    const row = element("tr", body);
    for (const cell of cells) element("td", row, cell);
  }
}

const plots = [];
function build(block, place) {
  const card = element("section", document.getElementById(place), undefined, "figure");
  card.classList.toggle("wide", block.wide);
  card.classList.toggle("missing", block.missing !== "");
  element("h2", card, block.title);
  element("p", card, block.missing || block.caption, "muted");
  if (block.rows.length) table(card, block);
  if (!block.drawings.length) return;
  const plot = element("div", card, undefined, "plot");
  plot.id = block.id;
  plot.style.height = `${block.pixels}px`;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", block.title);
  plots.push({plot, drawings: block.drawings});
}
for (const block of report.training) build(block, "training");
for (const block of report.load) build(block, "expert-load");

document.getElementById("headline").textContent = report.headline;
document.getElementById("headline").classList.toggle("fits", report.well);
for (const {id, name, value, note, mood} of report.cards) {
  const card = element("div", document.getElementById("cards"), undefined, "card");
  element("p", card, name, "muted");
  element("p", card, value, `value ${mood}`).id = id;
  element("p", card, note, "muted");
}
for (const [term, meaning] of report.facts) {
  element("dt", document.getElementById("facts"), term);
  element("dd", document.getElementById("facts"), meaning);
}

function draw(all) {
  for (const {plot, drawings} of plots) {
    if (!all && drawings.length === 1) continue;
    const {data, layout} = inTheme(drawings.length === 1 ? drawings[0] : drawings[Number(time.value)]);
    Plotly.react(plot, data, layout, {displayModeBar: false, responsive: true});
  }
}
function move() {
  const words = report.positions[Number(time.value)];
  document.getElementById("time-value").textContent = words;
  time.setAttribute("aria-valuetext", words);
}
if (report.positions.length) {
  time.max = String(report.positions.map((_, index) => index).at(-1));
  time.value = time.max;
  time.disabled = report.positions.length === 1;
  document.getElementById("controls").hidden = false;
  move();
}
time.addEventListener("input", () => { move(); draw(false); });
darkTheme.addEventListener("change", () => draw(true));
draw(true);
</script>
</body>
</html>
"""
