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
    else if (prompt.value.trim() || $("media").childElementCount) say(prompt.value);
  });
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

async function say(text) {
  const log = $("log"), prompt = $("prompt");
  let format;
  try {
    format = answerFormat();
  } catch (error) {
    showError(error);
    $("settings").open = true;
    $("schema").focus();
    return;
  }
  $("welcome")?.remove();
  prompt.value = "";
  grow();
  const media = takeMedia();
  const asked = { role: "user", content: contentOf(text, media) };
  messages.push(asked);
  const question = message("user", text);
  if (media.length) {
    const list = make("div", "media");
    list.append(...media.map(shown));
    question.element.prepend(list);
  }
  log.append(question.element);
  const answer = message("assistant", "");
  answer.element.setAttribute("aria-busy", "true");
  log.append(answer.element);
  log.scrollTop = log.scrollHeight;
  const mine = answering = new AbortController();
  setButton(true);
  const started = performance.now();
  let content = "", firstAt = 0, lastAt = 0, usage = null, failure = null, isStopped = false;
  try {
    for await (const chunk of streamChat({ ...body(), ...format }, mine.signal)) {
      usage = chunk.usage ?? usage;
      const piece = chunk.choices[0]?.delta?.content;
      if (!piece) continue;
      lastAt = performance.now();
      firstAt ||= lastAt;
      content += piece;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      answer.show(content);
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    isStopped = error.name === "AbortError";
    if (!isStopped) failure = error;
  }
  if (answering === mine) {
    answering = null;
    setButton(false);
  }
  answer.element.setAttribute("aria-busy", "false");
  if (!messages.includes(asked)) return; // a new chat was begun
  if (content) {
    messages.push({ role: "assistant", content });
    answer.note(summary(usage, started, firstAt, lastAt, isStopped));
  } else {
    // Nothing came: the question goes back to where it can be sent again.
    messages.splice(messages.indexOf(asked), 1);
    answer.element.remove();
    if (failure && !prompt.value && !$("media").childElementCount) {
      prompt.value = text;
      setMedia(media);
      grow();
    }
  }
  if (failure) showError(failure);
  log.scrollTop = log.scrollHeight;
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

// The field that makes the answer JSON of the schema in the settings; none without one. Throws for what is no JSON.
function answerFormat() {
  const text = $("schema").value.trim();
  if (!text) return {};
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Error(`The JSON schema of the answer is no JSON: ${error.message}`);
  }
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
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

// One message on the page: its element, a way to show more of it, and a way to close it with a note.
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
  return { element, show, note };
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
