// A box on a picture: drawn with the mouse or a pen, or given by its edges with keys or a finger.

import { h } from "./dom.js";

const LEAST = 0.02; // of the picture's width and height: less is a click

/** An outline over `stack`, the element of a picture. With `drawn`, a box is drawn by dragging: `drawn([x0, y0, x1, y1])`, in
 * shares of width and height. Returns {show(box)}; null shows none. */
export function outline(stack, drawn) {
  const frame = h("div", { class: "box", hidden: true });
  stack.append(frame);
  const show = (box) => {
    frame.hidden = box === null;
    if (box === null) return;
    const [x0, y0, x1, y1] = box.map((share) => 100 * share);
    Object.assign(frame.style, { left: `${x0}%`, top: `${y0}%`, width: `${x1 - x0}%`, height: `${y1 - y0}%` });
  };
  if (drawn) listen(stack, show, drawn);
  return { show };
}

function listen(stack, show, drawn) {
  let [start, before] = [null, null];
  const at = ({ clientX, clientY }) => {
    const { left, top, width, height } = stack.getBoundingClientRect();
    return [share((clientX - left) / width), share((clientY - top) / height)];
  };
  const boxTo = ([x, y]) => [Math.min(start[0], x), Math.min(start[1], y), Math.max(start[0], x), Math.max(start[1], y)];
  stack.classList.add("drawable");
  stack.addEventListener("dragstart", (event) => event.preventDefault());
  stack.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0) return; // a finger scrolls
    [start, before] = [at(event), stack.querySelector(".box")];
    before = before.hidden ? null : before.style.cssText;
    stack.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  stack.addEventListener("pointermove", (event) => start && show(boxTo(at(event))));
  stack.addEventListener("pointerup", (event) => {
    if (!start) return;
    const box = boxTo(at(event));
    start = null;
    if (box[2] - box[0] >= LEAST && box[3] - box[1] >= LEAST) return drawn(box);
    show(null);
    const frame = stack.querySelector(".box");
    if (before !== null) [frame.hidden, frame.style.cssText] = [false, before];
  });
  stack.addEventListener("pointercancel", () => {
    start = null;
    show(null);
  });
}

const EDGES = ["left", "top", "right", "bottom"];
const MIDDLE = [0.25, 0.25, 0.75, 0.75];

/** A button that opens four fields, the edges of a box in per cent of the picture of this number. What they hold is shown in
 * `frame` while they are open; `drawn(box)` gets it. Returns {button, fields, shows(box)}, of which the last tells which box is
 * shown while they are closed. */
export function edges(number, frame, drawn) {
  let before = null; // the box that was shown when the fields were opened
  const inputs = EDGES.map((edge) =>
    h("input", { type: "number", min: 0, max: 100, step: 5, "aria-label": `${edge} edge in per cent of image ${number}` }),
  );
  const problem = h("span", { class: "soft", role: "status" });
  const read = () => inputs.map((input) => share(Number(input.value) / 100));
  const fits = ([x0, y0, x1, y1]) => x1 - x0 >= LEAST && y1 - y0 >= LEAST;
  const fields = h(
    "form",
    { class: "edges", hidden: true, "aria-label": `Box in image ${number}`, novalidate: true },
    EDGES.map((edge, i) => h("label", {}, h("span", { "aria-hidden": "true" }, `${edge} %`), inputs[i])),
    h("button", { type: "submit", class: "small" }, "Look there"),
    problem,
  );
  const name = `Box in image ${number}`;
  const button = h("button", { type: "button", class: "small link", "aria-expanded": "false", "aria-label": name }, "Box");
  const toggle = (on) => {
    fields.hidden = !on;
    button.setAttribute("aria-expanded", String(on));
    problem.textContent = "";
    frame.show(on ? read() : before);
  };
  button.addEventListener("click", () => {
    if (!fields.hidden) return toggle(false);
    (before ?? MIDDLE).forEach((edge, i) => (inputs[i].value = String(Math.round(100 * edge))));
    toggle(true);
    inputs[0].focus();
  });
  fields.addEventListener("input", () => frame.show(fits(read()) ? read() : null));
  fields.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    toggle(false);
    button.focus();
  });
  fields.addEventListener("submit", (event) => {
    event.preventDefault();
    if (fits(read())) return drawn(read());
    problem.textContent = "The right edge must be behind the left one, and the bottom below the top.";
  });
  return { button, fields, shows: (box) => (before = box) };
}

/** A share with two digits, within the picture. */
const share = (value) => Math.round(100 * Math.min(1, Math.max(0, value))) / 100;
