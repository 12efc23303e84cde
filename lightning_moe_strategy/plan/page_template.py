"""The page without its numbers. Its script looks values up and draws them; it computes none."""

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
:root {
  --page: #f5f6f8; --card: #ffffff; --ink: #1c2330; --muted: #56606f; --edge: #dfe3ea;
  --blue: #3565c4; --good: #2f8f4e; --bad: #c8372d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1a202a; --ink: #e7ebf2; --muted: #9aa6b8; --edge: #2c3544;
    --blue: #7ea6f4; --good: #6cc788; --bad: #f2857b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 32px 24px 48px; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums;
}
h1 { margin: 0; font-size: 26px; line-height: 1.25; }
h2 { margin: 0; font-size: 17px; }
p { margin: 0; }
.muted { color: var(--muted); }
.verdict {
  margin: 20px 0; padding: 14px 18px; font-size: 17px; background: var(--card); border: 1px solid var(--edge);
  border-left: 5px solid var(--bad); border-radius: 8px;
}
.verdict.fits { border-left-color: var(--good); }
.controls {
  position: sticky; top: 0; z-index: 2; display: grid; gap: 8px 28px; align-items: end; padding: 14px 18px;
  grid-template-columns: repeat(3, 1fr) auto; background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; box-shadow: 0 3px 12px rgba(0, 0, 0, 0.06);
}
label { display: block; font-size: 14px; color: var(--muted); }
output { float: right; font-weight: 600; color: var(--ink); }
input[type=range] { width: 100%; margin: 6px 0 0; accent-color: var(--blue); }
button {
  padding: 6px 14px; font: inherit; font-size: 14px; color: var(--ink); background: transparent;
  border: 1px solid var(--edge); border-radius: 6px; cursor: pointer;
}
button:disabled { opacity: 0.45; cursor: default; }
.cards { display: grid; gap: 12px; margin: 16px 0; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.card, .figure, .facts {
  padding: 14px 18px; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
}
.card .value { font-size: 24px; font-weight: 600; line-height: 1.3; }
.card .value.good { color: var(--good); }
.card .value.bad { color: var(--bad); }
.card .muted, .figure .muted { font-size: 14px; }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.plot { height: 380px; margin-top: 6px; }
.facts { margin-top: 16px; }
.facts dl { display: grid; gap: 4px 20px; margin: 8px 0 0; grid-template-columns: max-content 1fr; font-size: 14px; }
.facts table { width: 100%; margin-top: 8px; border-collapse: collapse; font-size: 14px; }
th { font-weight: 400; text-align: left; color: var(--muted); }
td, th { padding: 3px 20px 3px 0; vertical-align: top; }
td:nth-child(2), td:nth-child(3), th:nth-child(2), th:nth-child(3) { text-align: right; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 860px) {
  .figures, .controls { grid-template-columns: minmax(0, 1fr); }
  .controls { position: static; }
  .facts dl { grid-template-columns: 1fr; }
}
</style>
</head>
<body>
<header>
  <h1>{{title}}</h1>
  <p class="muted">{{subtitle}}</p>
</header>
<p class="verdict" id="verdict"></p>
<div class="controls" id="controls"></div>
<div class="cards" id="cards"></div>
<main class="figures" id="figures"></main>
<section class="facts"><h2>What the numbers rest on</h2><dl id="facts"></dl></section>
<section class="facts" id="seed" hidden>
  <h2>Where the seed's round numbers differ</h2>
  <table><thead><tr><th>Quantity</th><th>Seed</th><th>Exact</th><th>Why</th></tr></thead><tbody></tbody></table>
</section>
<noscript><p>The figures need JavaScript; nothing is loaded from a network.</p></noscript>
<script type="application/json" id="plan">{{data}}</script>
<script>{{plotly}}</script>
<script>
"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const darkTheme = matchMedia("(prefers-color-scheme: dark)");

function element(tag, parent, text, className) {
  const made = parent.appendChild(document.createElement(tag));
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const controls = document.getElementById("controls");
const sliders = plan.sliders.map(slider => {
  const label = element("label", controls, slider.name);
  const output = element("output", label);
  const input = element("input", label);
  Object.assign(input, {type: "range", min: 0, max: slider.last, step: 1, value: slider.start});
  input.id = slider.id;
  output.id = slider.id + "-value";
  input.addEventListener("input", show);
  return {input, output, slider};
});
const reset = element("button", controls, "Back to the plan");
reset.addEventListener("click", () => {
  for (const {input, slider} of sliders) input.value = slider.start;
  show();
});

const plots = plan.figures.map(figure => {
  const card = element("section", document.getElementById("figures"), undefined, "figure");
  element("h2", card, figure.title);
  element("p", card, figure.caption, "muted");
  const plot = element("div", card, undefined, "plot");
  plot.id = figure.id;
  return plot;
});
for (const [term, meaning] of plan.facts) {
  element("dt", document.getElementById("facts"), term);
  element("dd", document.getElementById("facts"), meaning);
}

for (const difference of plan.differences) {
  const row = element("tr", document.querySelector("#seed tbody"));
  for (const cell of difference) element("td", row, cell);
  document.getElementById("seed").hidden = false;
}

function inTheme(figure) {
  const colors = plan.themes[darkTheme.matches ? "dark" : "light"];
  return JSON.parse(JSON.stringify(figure).replace(/"@([a-z]+)"/g, (_, name) => JSON.stringify(colors[name])));
}

function show() {
  let state = plan.states;
  for (const {input, output, slider} of sliders) {
    state = state[Number(input.value)];
    output.textContent = slider.steps[Number(input.value)];
    input.setAttribute("aria-valuetext", output.textContent);
  }
  reset.disabled = sliders.every(({input, slider}) => Number(input.value) === slider.start);
  const summary = plan.summaries[state.summary];
  const verdict = document.getElementById("verdict");
  verdict.textContent = summary.verdict;
  verdict.classList.toggle("fits", summary.fits);
  const cards = document.getElementById("cards");
  cards.replaceChildren();
  for (const {id, name, value, note, mood} of summary.cards) {
    const card = element("div", cards, undefined, "card");
    element("p", card, name, "muted");
    element("p", card, value, "value " + mood).id = id;
    element("p", card, note, "muted");
  }
  plan.figures.forEach((figure, index) => {
    const {data, layout} = inTheme(figure.drawings[state.figures[index]]);
    Plotly.react(plots[index], data, layout, {displayModeBar: false, responsive: true});
  });
}
darkTheme.addEventListener("change", show);
show();
</script>
</body>
</html>
"""
