// The tray of pictures: chosen, dropped or pasted, reordered and removed.

import { h } from "./dom.js";
import { editable, keepPage } from "./drops.js";

const EXTENSIONS = {
  "image/png": "png",
  "image/jpeg": "jpg",
  "image/webp": "webp",
  "image/gif": "gif",
  "image/bmp": "bmp",
};

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** The tray in `list`; calls `changed()` after every change and `refused(message)` where a picture is not taken. */
export class Tray {
  constructor(list, { changed, refused }) {
    Object.assign(this, { list, changed, refused, pictures: [], limit: Infinity });
  }

  /** Replace all pictures by blobs [{name, blob}]. */
  async set(files) {
    this.pictures = [];
    await this.add(files);
  }

  async add(files) {
    for (const { name, blob } of files) {
      if (this.pictures.length >= this.limit) {
        this.refused(`At most ${this.limit} pictures go into one request.`);
        break;
      }
      const url = blob.type.startsWith("image/") ? await dataUrl(blob).catch(() => null) : null;
      if (url === null || !(await readable(url))) {
        this.refused(`${name} is not a picture that this browser can show.`);
        continue;
      }
      this.pictures.push({ name, url, type: blob.type, extension: EXTENSIONS[blob.type] ?? "png" });
    }
    this.draw();
  }

  move(index, step) {
    const to = index + step;
    if (to < 0 || to >= this.pictures.length) return;
    this.pictures.splice(to, 0, ...this.pictures.splice(index, 1));
    this.draw();
    const buttons = this.list.children[to].querySelectorAll("button");
    const same = buttons[step < 0 ? 0 : 1];
    (same.disabled ? buttons[step < 0 ? 1 : 0] : same).focus();
  }

  remove(index) {
    this.pictures.splice(index, 1);
    this.draw();
    const next = this.list.children[Math.min(index, this.pictures.length - 1)];
    (next?.querySelector("button.remove") ?? document.getElementById("add")).focus();
  }

  draw() {
    const last = this.pictures.length - 1;
    this.list.replaceChildren(
      ...this.pictures.map((picture, i) =>
        h(
          "li",
          { class: `c-${(i % 6) + 1}` },
          h("img", { src: picture.url, alt: `Picture ${i + 1}: ${picture.name}` }),
          h("span", { class: "number-badge", "aria-hidden": "true" }, String(i + 1)),
          h(
            "div",
            { class: "tray-buttons" },
            h(
              "button",
              {
                type: "button",
                "aria-label": `Move picture ${i + 1} forward`,
                disabled: i === 0,
                on: { click: () => this.move(i, -1) },
              },
              "‹",
            ),
            h(
              "button",
              {
                type: "button",
                "aria-label": `Move picture ${i + 1} back`,
                disabled: i === last,
                on: { click: () => this.move(i, 1) },
              },
              "›",
            ),
            h(
              "button",
              {
                type: "button",
                class: "remove",
                "aria-label": `Remove picture ${i + 1}`,
                on: { click: () => this.remove(i) },
              },
              "×",
            ),
          ),
        ),
      ),
    );
    this.changed();
  }
}

function readable(url) {
  return new Promise((resolve) => {
    const image = new Image();
    image.onload = () => resolve(true);
    image.onerror = () => resolve(false);
    image.src = url;
  });
}

/** Take pictures from `button` with `input`, and what is dropped or pasted anywhere; `zone` shows that it is awaited. */
export function listen(tray, { button, input, zone }) {
  const take = (files) => tray.add([...files].map((file) => ({ name: file.name, blob: file })));
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await take(input.files);
    input.value = "";
  });
  keepPage({ take, over: (dragged) => zone.classList.toggle("over", dragged) });
  document.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    // Office programs put a picture of copied text beside the text, which is what is meant in a field.
    if (!files.length || (editable(event.target) && types.includes("text/plain"))) return;
    event.preventDefault();
    take(files);
  });
}
