// Two chats side by side, each a page of its own with its own settings. A message goes to both. A chat that refuses or
// loses it shows its own composer, with the text.

import { startTheme } from "./theme.js";

const frames = [...document.querySelectorAll("iframe")];
const prompt = document.getElementById("prompt"), form = document.getElementById("composer");
const send = document.getElementById("send");

const isAnswering = (chat) => chat.querySelector("article[aria-busy=true]") !== null;

// The documents of the chats that are loaded.
const chats = () => frames.map((frame) => frame.contentDocument).filter((chat) => chat?.getElementById("prompt"));

const update = () => (send.textContent = chats().some(isAnswering) ? "Stop" : "Send");
const watch = (frame) =>
  new MutationObserver(update).observe(frame.contentDocument.body, { subtree: true, childList: true, attributeFilter: ["aria-busy"] });
for (const frame of frames) {
  frame.addEventListener("load", () => watch(frame));
  if (chats().includes(frame.contentDocument)) watch(frame); // it was loaded before this module
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!chats().some(isAnswering)) form.requestSubmit();
  }
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chats().some(isAnswering)) return stop();
  if (!prompt.value.trim() || chats().length < frames.length) return;
  for (const chat of chats()) chat.dispatchEvent(new CustomEvent("say", { detail: prompt.value }));
  prompt.value = "";
});
startTheme(() => {});

function stop() {
  for (const chat of chats().filter(isAnswering)) chat.getElementById("composer").requestSubmit();
}
