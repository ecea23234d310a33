// The page as a whole: which view a narrow screen shows, and the start of all parts.

import { startChat } from "./chat.js";
import { redraw, startEngine } from "./engine.js";
import { startTheme } from "./theme.js";

for (const view of document.querySelectorAll("[data-shows]")) {
  view.addEventListener("click", () => {
    document.body.dataset.view = view.dataset.shows;
    for (const other of document.querySelectorAll("[data-shows]")) other.setAttribute("aria-pressed", String(other === view));
  });
}

if (window.parent !== window) document.body.classList.add("framed"); // by compare.html, which has the composer
startTheme(redraw);
startChat();
startEngine();
