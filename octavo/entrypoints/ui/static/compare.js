// Two chats side by side, each a page of its own with its own settings. A message goes to both.

import { startTheme } from "./theme.js";

const prompt = document.getElementById("prompt"), form = document.getElementById("composer");

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const chats = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument);
  const answering = chats.some((chat) => chat.querySelector("article[aria-busy=true]"));
  if (!prompt.value.trim() || answering) return;
  for (const chat of chats) {
    chat.getElementById("prompt").value = prompt.value;
    chat.getElementById("composer").requestSubmit();
  }
  prompt.value = "";
});
startTheme(() => {});
