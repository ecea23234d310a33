// The live view: asks the server once a second while somebody looks, keeps two minutes, and draws them.

import { getStats } from "./api.js";
import { SPAN_S, drawLines, drawMap } from "./charts.js";

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000;
const RETRY_MS = 3000;

const points = [];
let last = null; // the answer before
let timer = 0;

export function startEngine() {
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
  new ResizeObserver(draw).observe($("chart-tokens"));
  poll();
}

const isShown = () => $("map").offsetParent !== null;

async function poll() {
  clearTimeout(timer);
  let wait = PERIOD_MS;
  try {
    if (isShown() || !last) {
      const stats = await getStats();
      document.dispatchEvent(new CustomEvent("stats", { detail: stats }));
      take(stats);
    }
    setStatus("ready", "ready");
  } catch (error) {
    last = null;
    wait = RETRY_MS;
    if (error.status === 401) setStatus("down", "API key needed");
    else if (error.code === "engine_loading") setStatus("loading", "loading the model");
    else setStatus("down", error.status ? error.message : "not reachable");
  }
  if (!document.hidden) timer = setTimeout(poll, wait);
}

function setStatus(state, text) {
  const status = $("status");
  if (status.textContent === text) return; // it is read out when it changes
  status.dataset.state = state;
  status.textContent = text;
  status.title = text;
}

function take(stats) {
  const before = last;
  last = stats;
  $("model").textContent = stats.model;
  document.title = `${stats.model} · Octavo`;
  if (before && stats.generation_tokens >= before.generation_tokens) {
    const seconds = Math.max(stats.time_s - before.time_s, 1e-3);
    points.push({
      at: stats.time_s,
      generated: (stats.generation_tokens - before.generation_tokens) / seconds,
      prompt: (stats.prompt_tokens - before.prompt_tokens) / seconds,
      running: stats.running,
      waiting: stats.waiting,
      ttft: mean(stats.ttft, before.ttft),
      itl: mean(stats.itl, before.itl),
      step: mean(stats.step, before.step),
      predicted: mean(stats.predicted_step, before.predicted_step),
    });
    while (points[0].at < stats.time_s - SPAN_S) points.shift();
  }
  draw();
}

// Milliseconds, of what was counted between two answers; null for nothing.
const mean = ([count, sum], [countBefore, sumBefore]) =>
  count > countBefore ? (1000 * (sum - sumBefore)) / (count - countBefore) : null;

const latest = (field) => points.findLast((point) => point[field] !== null)?.[field] ?? null;

function setDuration(id, ms) {
  const unit = document.createElement("small");
  const [value, name] = ms === null ? ["–", ""] : ms < 1000 ? [ms.toFixed(ms < 10 ? 1 : 0), "ms"] : [(ms / 1000).toFixed(1), "s"];
  unit.textContent = name;
  $(id).replaceChildren(value, unit);
}

function draw() {
  if (!last || !isShown()) return;
  const now = last.time_s;
  $("running").textContent = last.running;
  $("waiting").textContent = last.waiting + last.swapped;
  setDuration("ttft", latest("ttft"));
  setDuration("itl", latest("itl"));
  drawLines($("chart-tokens"), points, now, [["prompt", "--line-2", false], ["generated", "--line-1", true]]);
  drawLines($("chart-requests"), points, now, [["waiting", "--line-3", false], ["running", "--line-1", true]]);
  drawLines($("chart-ttft"), points, now, [["ttft", "--line-1", false]]);
  drawLines($("chart-itl"), points, now, [["itl", "--line-1", false]]);
  drawLines($("chart-step"), points, now, [["predicted", "--line-2", false], ["step", "--line-1", false]]);
  if (last.blocks) drawBlocks();
  drawFlight();
  const hits = last.prefix_queries ? `${Math.round((100 * last.prefix_hits) / last.prefix_queries)}% of prompt tokens cached · ` : "";
  const guessed = last.guessed ? `${Math.round((100 * last.accepted) / last.guessed)}% of ${number(last.guessed)} guessed tokens accepted · ` : "";
  const ended = Object.values(last.finished).reduce((a, b) => a + b, 0);
  $("totals").textContent = `Since the start: ${number(ended)} requests · ${number(last.prompt_tokens)} prompt tokens · `
    + `${number(last.generation_tokens)} generated · ${hits}${guessed}${number(last.preemptions)} preemptions`;
}

// The sequences that run or wait, each with its share of the last step's tokens.
function drawFlight() {
  const total = last.sequences.reduce((sum, one) => sum + one.num_step_tokens, 0) || 1;
  $("flight").replaceChildren(...last.sequences.map((one) => {
    const row = document.createElement("tr");
    const prompt = one.num_computed_tokens < one.num_prompt_tokens
      ? `${number(one.num_computed_tokens)} of ${number(one.num_prompt_tokens)}` : number(one.num_prompt_tokens);
    const share = one.is_running ? `${Math.round((100 * one.num_step_tokens) / total)}%` : "waits";
    for (const text of [one.request_id ? `…${one.request_id}` : "–", prompt, number(one.num_output_tokens), number(one.num_blocks), share]) {
      row.insertCell().textContent = text;
    }
    return row;
  }));
  const hidden = last.running + last.waiting + last.swapped - last.sequences.length;
  $("flight-more").textContent = last.sequences.length === 0 ? "none" : hidden > 0 ? `and ${number(hidden)} more` : "";
}

const number = (value) => value.toLocaleString("en");

function drawBlocks() {
  const counts = [0, 0, 0, 0];
  for (const [state, length] of last.blocks) counts[state] += length;
  counts.forEach((count, state) => ($(`blocks-${state}`).textContent = number(count)));
  const total = counts.reduce((a, b) => a + b, 0);
  const perCell = drawMap($("map"), last.blocks);
  $("blocks-total").textContent = `${number(total)} blocks of ${last.block_size} tokens`
    + (perCell > 1 ? `, ${perCell} in a square` : "");
  $("map").setAttribute("aria-label",
    `Map of the KV cache: ${counts[3]} blocks shared, ${counts[2]} in use, ${counts[1]} cached, ${counts[0]} free`);
}

export const redraw = draw;
