// A box that is drawn on a picture with the mouse or a pen.

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

/** A share with two digits, within the picture. */
const share = (value) => Math.round(100 * Math.min(1, Math.max(0, value))) / 100;
