// The conversation: what was said, how it is shown, and the one answer that may be under way.

import { apiKey, getModels, setApiKey, streamChat } from "./api.js";
import { renderMarkdown } from "./markdown.js";
import { contentOf, setMedia, shown, startMedia, takeMedia } from "./media.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

const messages = [];
let answering = null; // the AbortController of the answer under way

export function startChat() {
  const log = $("log"), prompt = $("prompt"), welcome = $("welcome");
  $("key").value = apiKey();
  $("key").addEventListener("change", () => {
    setApiKey($("key").value.trim());
    showAdapters();
  });
  $("settings").addEventListener("toggle", showAdapters); // others may have been loaded since
  showAdapters();
  startMedia();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (answering) answering.abort();
    else if (prompt.value.trim() || $("media").childElementCount) {
      const text = prompt.value, media = takeMedia();
      prompt.value = "";
      grow();
      say(text, media);
    }
  });
  document.addEventListener("say", (event) => say(event.detail)); // from compare.js; what is being written stays
  prompt.addEventListener("keydown", (event) => {
    // Enter confirms a word for those who compose characters.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!answering) $("composer").requestSubmit();
    }
  });
  prompt.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") answering?.abort();
  });
  for (const idea of welcome.querySelectorAll("button")) {
    idea.addEventListener("click", () => say(idea.textContent));
  }
  $("settings").addEventListener("toggle", () => (log.scrollTop = log.scrollHeight));
  $("clear").addEventListener("click", () => {
    answering?.abort();
    messages.length = 0;
    setMedia([]);
    log.replaceChildren(welcome);
    prompt.focus();
  });
}

// The adapters that there are to choose from; without any there is no choice.
async function showAdapters() {
  let models = [];
  try {
    models = await getModels();
  } catch { /* the status says what is wrong */ }
  const chosen = $("adapter").value;
  const names = models.filter((model) => model.parent).map((model) => model.id);
  $("adapter").replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name)));
  $("adapter").value = names.includes(chosen) ? chosen : "";
  $("adapters").hidden = names.length === 0;
}

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function say(text, media = []) {
  const log = $("log"), prompt = $("prompt");
  const restore = () => {
    if (prompt.value || $("media").childElementCount) return;
    prompt.value = text;
    setMedia(media);
    grow();
  };
  const fields = fieldsOfSettings();
  if (!fields) return restore();
  $("welcome")?.remove();
  const question = message("user", text);
  if (media.length) {
    const list = make("div", "media");
    list.append(...media.map(shown));
    question.element.prepend(list);
  }
  log.append(question.element);
  delete messages.at(-1)?.tool_calls; // calls that got no results
  await answerTo([{ role: "user", content: contentOf(text, media) }], fields, restore);
}

// Shows the answer to the conversation with the messages `asked` at its end. If nothing comes, they leave it, and after
// an error `restore` puts them where they can be sent again. Returns whether something came.
async function answerTo(asked, fields, restore) {
  const log = $("log");
  messages.push(...asked);
  const answer = message("assistant", "");
  answer.element.setAttribute("aria-busy", "true");
  log.append(answer.element);
  log.scrollTop = log.scrollHeight;
  const mine = answering = new AbortController();
  setButton(true);
  const started = performance.now(), calls = [];
  let content = "", reasoning = "", firstAt = 0, lastAt = 0, usage = null, failure = null, isStopped = false, frame = 0;
  const draw = () => {
    frame = 0;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (reasoning) answer.think(reasoning);
    answer.show(content);
    if (follows) log.scrollTop = log.scrollHeight;
  };
  try {
    for await (const chunk of streamChat({ ...body(), ...fields }, mine.signal)) {
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta;
      if (!delta?.content && !delta?.reasoning_content && !delta?.tool_calls) continue;
      lastAt = performance.now();
      firstAt ||= lastAt;
      reasoning += delta.reasoning_content ?? "";
      content += delta.content ?? "";
      for (const part of delta.tool_calls ?? []) addToCall(calls, part);
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    isStopped = error.name === "AbortError";
    if (!isStopped) failure = error;
  }
  cancelAnimationFrame(frame);
  draw();
  if (answering === mine) {
    answering = null;
    setButton(false);
  }
  answer.element.setAttribute("aria-busy", "false");
  if (!messages.includes(asked[0])) return true; // a new chat was begun
  const came = Boolean(content || reasoning || calls.length);
  if (came) {
    const said = { role: "assistant", content };
    if (reasoning) said.reasoning_content = reasoning;
    if (calls.length && !failure && !isStopped) {
      said.tool_calls = calls;
      answer.element.append(formOfCalls(calls));
    }
    messages.push(said);
    answer.note(summary(usage, started, firstAt, lastAt, isStopped));
  } else {
    messages.splice(messages.indexOf(asked[0]), asked.length);
    answer.element.remove();
    if (failure) restore();
  }
  if (failure) showError(failure);
  log.scrollTop = log.scrollHeight;
  return came;
}

function addToCall(calls, { index, id, function: part, custom }) {
  const call = calls[index] ??= custom
    ? { id: "", type: "custom", custom: { name: "", input: "" } }
    : { id: "", type: "function", function: { name: "", arguments: "" } };
  if (id) call.id = id;
  if (call.custom) {
    call.custom.name += custom?.name ?? "";
    call.custom.input += custom?.input ?? "";
  } else {
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
}

// The calls of an answer, with a field for the result of each: the reader is the tool.
function formOfCalls(calls) {
  const form = make("form", "calls"), send = make("button", "primary", "Send the results");
  const fields = calls.map(({ function: called, custom }) => {
    const { name, arguments: written } = called ?? { name: custom.name, arguments: custom.input };
    const label = make("label", "", `${name}(${written})`), field = document.createElement("textarea");
    field.rows = 1;
    field.placeholder = "What the tool answers";
    label.append(field);
    form.append(label);
    return field;
  });
  form.append(send);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const fieldsOfBody = fieldsOfSettings();
    if (answering || !fieldsOfBody) return;
    send.disabled = true;
    if (messages.at(-1)?.tool_calls !== calls) return; // the conversation has gone on without the results
    const results = calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: fields[i].value }));
    send.disabled = await answerTo(results, fieldsOfBody, () => {});
  });
  return form;
}

function body() {
  const system = $("system").value.trim();
  const fields = { messages: system ? [{ role: "system", content: system }, ...messages] : [...messages] };
  if ($("adapter").value) fields.model = $("adapter").value;
  for (const name of NUMBERS) {
    const value = $(name).value;
    if (value !== "") fields[name] = Number(value);
  }
  return fields;
}

// The fields of a request that the JSON in the settings gives; null, with an error shown, if it cannot be read.
function fieldsOfSettings() {
  const fields = {};
  for (const [id, what, read] of [
    ["schema", "JSON schema of the answer", (schema) => {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }],
    ["functions", "list of tools", (tools) => {
      fields.tools = tools.map((tool) => (tool.type ? tool : { type: "function", function: tool }));
    }],
  ]) {
    const text = $(id).value.trim();
    try {
      if (text) read(JSON.parse(text));
    } catch (error) {
      showError(new Error(`The ${what} cannot be read: ${error.message}`));
      $("settings").open = true;
      $(id).focus();
      return null;
    }
  }
  return fields;
}

function summary(usage, started, firstAt, lastAt, isStopped) {
  const parts = isStopped ? ["stopped"] : [];
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(`${tokens} tokens`);
  if (tokens > 1 && lastAt > firstAt) parts.push(`${(1000 * (tokens - 1) / (lastAt - firstAt)).toFixed(0)} tokens/s`);
  parts.push(`first after ${Math.round(firstAt - started)} ms`);
  return parts.join(" · ");
}

function setButton(stops) {
  const button = $("send");
  button.textContent = stops ? "Stop" : "Send";
  button.classList.toggle("stops", stops);
}

function showError(error) {
  const element = make("p", "error", error.message);
  element.setAttribute("role", "alert");
  $("log").append(element);
  if (error.status === 401) {
    $("settings").open = true;
    $("key").focus();
  }
}

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

// One message on the page: its element, ways to show more of its text and its reasoning, and to close it with a note.
function message(role, text) {
  const element = make("article", `message ${role}`);
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const shown = make("div", "text"), meta = make("div", "meta");
  element.append(shown, meta);
  let whole = text;
  const show = (content) => {
    whole = content;
    if (role === "user") shown.textContent = content;
    else renderMarkdown(shown, content);
  };
  let thoughts = null;
  const think = (reasoning) => {
    if (!thoughts) {
      const details = make("details", "reasoning");
      thoughts = make("div", "text");
      details.append(make("summary", "", "Reasoning"), thoughts);
      element.prepend(details);
    }
    thoughts.textContent = reasoning;
  };
  const addCopy = () => {
    const copy = make("button", "plain", "Copy");
    copy.type = "button";
    copy.setAttribute("aria-label", role === "user" ? "Copy the message" : "Copy the answer");
    copy.addEventListener("click", async () => {
      copy.textContent = (await copyText(whole)) ? "Copied" : "Not copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    meta.append(copy);
  };
  show(text);
  if (role === "user") addCopy();
  const note = (words) => {
    meta.append(words);
    addCopy();
  };
  return { element, show, think, note };
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages over plain HTTP have no clipboard; a selection that is copied does as well.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
