// Light or dark, as the system or the button says. The gateway's page has it too.

const THEMES = { system: "◐", light: "○", dark: "●" };
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");

// `redraw` is called when colours have changed.
export function startTheme(redraw) {
  const show = () => {
    const theme = localStorage.getItem("octavo-theme") ?? "system";
    const isDark = theme === "dark" || (theme === "system" && systemIsDark.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    const label = `Theme: ${theme === "system" ? "as the system" : theme}`;
    button.textContent = THEMES[theme];
    button.title = label;
    button.setAttribute("aria-label", label);
    redraw();
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const theme = localStorage.getItem("octavo-theme") ?? "system";
    localStorage.setItem("octavo-theme", names[(names.indexOf(theme) + 1) % names.length]);
    show();
  });
  systemIsDark.addEventListener("change", show);
  addEventListener("storage", show); // another page of this server has changed it
  show();
}
