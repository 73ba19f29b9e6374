// What is shown, as files.

import { short } from "./dom.js";
import { heatColour } from "./heat.js";

const SIDE = 512; // of a saved map, at least
const FOOT = 56;

/** Have the browser save a blob. */
export function saveBlob(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const saveJson = (name, value) =>
  saveBlob(`${name}.json`, new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));

/** Save a picture with the map over it, and the legend below: colours from 0 to `top`, and what it shows. */
export function savePng(name, { image, canvas, top, note, gray }) {
  const scale = Math.max(1, SIDE / image.naturalWidth);
  const [width, height] = [image.naturalWidth, image.naturalHeight].map((side) => Math.round(side * scale));
  const file = Object.assign(document.createElement("canvas"), { width, height: height + FOOT });
  const context = file.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height + FOOT);
  context.drawImage(image, 0, 0, width, height);
  if (gray) {
    context.globalCompositeOperation = "saturation"; // of the picture, none
    context.fillStyle = "#000";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "source-over";
  }
  context.drawImage(canvas, 0, 0, width, height);
  for (let x = 0; x < 160; x += 1) {
    context.fillStyle = `rgb(${heatColour(x / 159).join(" ")})`;
    context.fillRect(28 + x, height + 10, 1, 12);
  }
  context.fillStyle = "#222";
  context.font = "13px sans-serif";
  context.fillText("0", 12, height + 21);
  context.fillText(short(top), 196, height + 21);
  context.fillText(note, 12, height + 43, width - 24);
  file.toBlob((blob) => saveBlob(`${name}.png`, blob), "image/png");
}
