// The page of the gateway: asks once a second while somebody looks, keeps two minutes, and draws them.

import { apiKey, getStats, setApiKey } from "./api.js";
import { SPAN_S, drawLines } from "./charts.js";
import { startTheme } from "./theme.js";

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000;
const RETRY_MS = 3000;

const points = [];
let last = null; // the answer before
let timer = 0;

const number = (value) => value.toLocaleString("en");
const gib = (value) => `${+value.toFixed(1)}`;
const total = (field) => last.models.reduce((sum, model) => sum + model[field], 0);

async function poll() {
  clearTimeout(timer);
  let wait = PERIOD_MS;
  try {
    take(await getStats());
    $("ask-key").hidden = true;
    setStatus("ready", "ready");
  } catch (error) {
    last = null;
    wait = RETRY_MS;
    if (error.status === 401) {
      if ($("ask-key").hidden) {
        $("ask-key").hidden = false;
        $("key").focus();
      }
      setStatus("down", apiKey() ? "wrong API key" : "API key needed");
    } else setStatus("down", error.status ? error.message : "not reachable");
  }
  if (!document.hidden) timer = setTimeout(poll, wait);
}

function setStatus(state, text) {
  const status = $("status");
  if (status.textContent === text) return; // it is read out when it changes
  status.dataset.state = state;
  status.textContent = text;
}

function take(stats) {
  const before = last;
  last = stats;
  if (before) {
    const seconds = Math.max(stats.time_s - before.time_s, 1e-3);
    const rate = (count) => Math.max(0, count(stats) - count(before)) / seconds;
    const [began, waited] = stats.first_byte.map((value, i) => value - before.first_byte[i]);
    points.push({
      at: stats.time_s,
      inFlight: total("in_flight"),
      waiting: total("waiting"),
      answered: rate((one) => one.refused + one.models.reduce((sum, model) => sum + model.answered, 0)),
      failed: rate((one) => one.models.reduce((sum, model) => sum + model.failed, 0)),
      firstByte: began > 0 ? (1000 * waited) / began : null,
    });
    while (points[0].at < stats.time_s - SPAN_S) points.shift();
  }
  draw();
}

// An element with a class and children, which may be texts.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function state(text) {
  const element = make("span", "state", text);
  element.dataset.state = text;
  return element;
}

function drawModel(model) {
  const item = make("li", "", make("h3", "", make("span", "", model.name), state(model.state)));
  if (model.aliases.length) item.append(make("p", "quiet aliases", `also ${model.aliases.join(", ")}`));
  const numbers = { answering: model.in_flight, waiting: model.waiting, answered: model.answered, failed: model.failed };
  if (model.is_local) numbers.starts = model.starts;
  if (model.failed_starts) numbers["failed starts"] = model.failed_starts;
  if (model.memory_gib !== null) numbers.GiB = model.memory_gib;
  if (model.replicas.length > 1) numbers["by prefix"] = model.affine;
  item.append(make("dl", "", ...Object.entries(numbers).map(([name, value]) =>
    make("div", "", make("dt", "", name), make("dd", "", name === "GiB" ? gib(value) : number(value))))));
  if (model.replicas.length) {
    item.append(make("ul", "replicas", ...model.replicas.map((replica) =>
      make("li", "", make("span", "", replica.name), make("span", "quiet", `${number(replica.in_flight)} answering `), state(replica.state)))));
  }
  return item;
}

function drawKey(key) {
  const name = make("th", "", key.is_enabled ? key.name : `${key.name} (disabled)`);
  name.scope = "row";
  return make("tr", "", name, ...[key.requests, key.prompt_tokens, key.completion_tokens].map((value) => make("td", "", number(value))));
}

// Replaces the children only if what they show has changed: a selection, and a screen reader's place, stay.
function fill(element, things, drawOne) {
  const text = JSON.stringify(things);
  if (element.shown === text) return;
  element.shown = text;
  element.replaceChildren(...things.map(drawOne));
}

function draw() {
  if (!last) return;
  const { memory, keys } = last, now = last.time_s;
  $("version").textContent = last.version;
  $("in-flight").textContent = number(total("in_flight"));
  $("waiting").textContent = number(total("waiting"));
  const firstByte = points.findLast((point) => point.firstByte !== null)?.firstByte ?? null;
  $("first-byte").replaceChildren(firstByte === null ? "–" : number(Math.round(firstByte)), make("small", "", firstByte === null ? "" : "ms"));
  const isBounded = memory.total_gib !== null;
  $("memory").replaceChildren(isBounded || memory.held_gib ? gib(memory.held_gib) : "–",
    make("small", "", isBounded ? `of ${gib(memory.total_gib)} GiB` : memory.held_gib ? "GiB" : ""));
  drawLines($("chart-requests"), points, now, [["waiting", "--line-3", false], ["inFlight", "--line-1", true]]);
  drawLines($("chart-answers"), points, now, [["failed", "--line-3", false], ["answered", "--line-1", true]]);
  fill($("models"), last.models, drawModel);
  $("keys-section").hidden = keys === null;
  fill($("keys"), keys ?? [], drawKey);
  $("totals").textContent = `Since the start: ${number(total("answered"))} answers of models · ${number(last.refused)} refused by the gateway · `
    + `${number(memory.evictions)} models stopped for the memory of another`;
}

$("ask-key").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  setApiKey($("key").value);
  poll();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
new ResizeObserver(draw).observe($("chart-requests"));
startTheme(draw);
poll();
