// Loaded before the page is drawn, so that a chosen theme never flashes in the other one.
(() => {
  const root = document.documentElement;
  const NAME = "helmsight.theme";
  let stored = null;
  try {
    stored = localStorage.getItem(NAME);
  } catch {
    // a browser without storage: the system's theme
  }
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(dark()));
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      show();
      try {
        localStorage.setItem(NAME, root.dataset.theme);
      } catch {
        // then it lasts for as long as the page is open
      }
    });
    show();
  });
})();
