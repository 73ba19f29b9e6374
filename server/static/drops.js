// What is dropped on a page. Left alone, the browser opens it in the page's place, and what was typed there is lost.

/** Whether text goes there by itself when it is dropped or pasted. */
export const editable = (target) => target instanceof Element && target.closest("input, textarea") !== null;

/**
 * Keep the page whatever is dropped on it. `take(files)` gets files from outside, wherever they fall; `over(dragged)` tells
 * whether some are held above the page.
 */
export function keepPage({ take = null, over = () => {} } = {}) {
  let own = false; // a picture of the page itself is dragged, which is a file to the browser
  document.addEventListener("dragstart", () => (own = true));
  document.addEventListener("dragend", () => (own = false));

  const files = (event) => event.dataTransfer.types.includes("Files");
  const handled = (event) => files(event) || !editable(event.target); // text may be dragged into a field
  const taken = (event) => take !== null && !own && files(event);

  document.addEventListener("dragover", (event) => {
    if (!handled(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = taken(event) ? "copy" : "none";
    over(taken(event));
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && over(false));
  document.addEventListener("drop", (event) => {
    over(false);
    if (!handled(event)) return;
    event.preventDefault();
    if (taken(event)) take(event.dataTransfer.files);
  });
}
