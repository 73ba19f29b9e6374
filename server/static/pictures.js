// The tray of pictures: chosen, dropped or pasted, reordered and removed.

import { h } from "./dom.js";
import { editable, keepPage } from "./drops.js";

/** The formats that servers read. */
const EXTENSIONS = {
  "image/png": "png",
  "image/jpeg": "jpg",
  "image/webp": "webp",
  "image/gif": "gif",
  "image/bmp": "bmp",
  "image/avif": "avif",
};

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** A picture with its extension, of what is kept of it. */
export const asPicture = (kept) => ({ ...kept, extension: EXTENSIONS[kept.type] ?? "png" });

/** A picture of {name, blob, key}; null where it cannot be shown. One without a key gets one. */
export async function readPicture({ name, blob, key = null }) {
  const url = blob.type in EXTENSIONS ? await dataUrl(blob).catch(() => null) : null;
  if (url === null || !(await readable(url))) return null;
  return asPicture({ name, url, type: blob.type, key: key ?? `${Date.now()}-${Math.random()}` });
}

/** The tray in `list`; calls `changed()` after every change and `refused(message)` where a picture is not taken, before that
 * with null: what was told of earlier ones is over. */
export class Tray {
  constructor(list, { changed, refused }) {
    Object.assign(this, { list, changed, refused, pictures: [], limit: Infinity });
  }

  /** Replace all pictures. */
  show(pictures) {
    this.pictures = [...pictures];
    this.draw();
  }

  /** Add files [{name, blob}]. */
  async add(files) {
    this.refused(null);
    const unread = [];
    for (const file of files) {
      if (this.pictures.length >= this.limit) {
        this.refused(`A request may have at most ${this.limit} images.`);
        break;
      }
      const picture = await readPicture(file);
      if (picture) this.pictures.push(picture);
      else unread.push(file.name);
    }
    this.draw();
    if (unread.length)
      this.refused(`${unread.join(", ")} cannot be read as an image (${Object.values(EXTENSIONS).join(", ")}).`);
  }

  /** Take out a picture that the server could not read. */
  drop(picture) {
    this.pictures = this.pictures.filter((one) => one !== picture);
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
    const button = (label, sign, run, more = {}) =>
      h("button", { type: "button", "aria-label": label, on: { click: run }, ...more }, sign);
    this.list.replaceChildren(
      ...this.pictures.map((picture, i) =>
        h(
          "li",
          { class: `c-${(i % 6) + 1}` },
          h("img", { src: picture.url, alt: `Image ${i + 1}: ${picture.name}`, title: picture.name }),
          h("span", { class: "number-badge", "aria-hidden": "true" }, String(i + 1)),
          h(
            "div",
            { class: "tray-buttons" },
            button(`Move image ${i + 1} forward`, "‹", () => this.move(i, -1), { disabled: i === 0 }),
            button(`Move image ${i + 1} back`, "›", () => this.move(i, 1), { disabled: i === last }),
            button(`Remove image ${i + 1}`, "×", () => this.remove(i), { class: "remove" }),
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
