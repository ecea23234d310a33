// The page as a whole: light or dark, which view a narrow screen shows, and the start of both.

import { startChat } from "./chat.js";
import { redraw, startEngine } from "./engine.js";

const THEMES = { system: "◐", light: "○", dark: "●" };
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");

function showTheme() {
  const theme = localStorage.getItem("octavo-theme") ?? "system";
  const isDark = theme === "dark" || (theme === "system" && systemIsDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const label = `Theme: ${theme === "system" ? "as the system" : theme}`;
  button.textContent = THEMES[theme];
  button.title = label;
  button.setAttribute("aria-label", label);
  redraw();
}

button.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const theme = localStorage.getItem("octavo-theme") ?? "system";
  localStorage.setItem("octavo-theme", names[(names.indexOf(theme) + 1) % names.length]);
  showTheme();
});
systemIsDark.addEventListener("change", showTheme);

for (const view of document.querySelectorAll("[data-shows]")) {
  view.addEventListener("click", () => {
    document.body.dataset.view = view.dataset.shows;
    for (const other of document.querySelectorAll("[data-shows]")) other.setAttribute("aria-pressed", String(other === view));
  });
}

showTheme();
startChat();
startEngine();
