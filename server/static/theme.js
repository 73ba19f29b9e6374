// Loaded before the page is drawn, so that a chosen theme never flashes in the other one.
(() => {
  const root = document.documentElement;
  const stored = localStorage.getItem("helmsight.theme");
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(dark()));
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      localStorage.setItem("helmsight.theme", root.dataset.theme);
      show();
    });
    show();
  });
})();
