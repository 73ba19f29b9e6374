// The sample scenes that come with the model.

import { getBlob, getJson } from "./api.js";
import { byId, h } from "./dom.js";
import { sampleKey } from "./keep.js";
import { readPicture } from "./pictures.js";

const blobs = new Map();

/** The blob of a sample's picture, asked for once. */
function blobOf(name) {
  if (!blobs.has(name)) {
    const found = getBlob(`/samples/${encodeURIComponent(name)}`);
    found.catch(() => blobs.delete(name));
    blobs.set(name, found);
  }
  return blobs.get(name);
}

/** A sample's picture by its name; null where there is none. */
export const samplePicture = async (name) => {
  const blob = await blobOf(name).catch(() => null);
  return blob && readPicture({ name, blob, key: sampleKey(name) });
};

/** Show the scenes; `pick(sample, pictures)` is called when one is chosen. */
export async function showSamples(pick) {
  const { data } = await getJson("/samples");
  byId("samples-section").hidden = data.length === 0;
  const buttons = await Promise.all(
    data.map(async (sample) => {
      const found = await Promise.all(sample.images.map(blobOf));
      const thumbs = found.map((blob) => h("img", { src: URL.createObjectURL(blob), alt: "" }));
      const button = h(
        "button",
        { type: "button", class: "sample", "aria-pressed": "false", "data-pictures": sample.images.join() },
        h("span", { class: "thumbs" }, thumbs),
        h("span", {}, sample.title),
      );
      button.addEventListener("click", async () => pick(sample, await Promise.all(sample.images.map(samplePicture))));
      return button;
    }),
  );
  byId("samples").replaceChildren(...buttons);
}

/** Mark the scene whose pictures are in the tray. */
export function markSample(pictures) {
  const shown = pictures.map(({ name }) => name).join();
  for (const button of byId("samples").children)
    button.setAttribute("aria-pressed", String(button.dataset.pictures === shown));
}
