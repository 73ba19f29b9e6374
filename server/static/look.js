// The pictures with heat maps over them: attention by layer, or what a word or a token of the answer rests on.

import { edges, outline } from "./box.js";
import { byId, h, percent, short } from "./dom.js";
import { drawHeat, heatColour, meanMap } from "./heat.js";
import { savePng } from "./save.js";
import { wordsOf } from "./words.js";

const SIDE = 168; // of the canvas; it is stretched over the picture

/** The section "Where it looked"; `follow(index)` hears which word the token slider is at, null for none, and `boxed(image,
 * box)` which box was drawn on a picture to draw attention there, null for none any more. */
export class Look {
  constructor(follow, boxed) {
    Object.assign(this, { follow, boxed, views: [], word: null, tokens: [], drawable: false });
    byId("box-clear").addEventListener("click", () => this.boxed(null, null));
    for (const id of ["layer", "opacity", "smooth", "gray"]) byId(id).addEventListener("input", () => this.draw());
    byId("token").addEventListener("input", () => this.#scrub());
    const scale = byId("scale-bar").getContext("2d");
    for (let x = 0; x < 96; x += 1) {
      scale.fillStyle = `rgb(${heatColour(x / 95).join(" ")})`;
      scale.fillRect(x, 0, 1, 8);
    }
  }

  /** Whether there are pictures to lay maps over. */
  get shown() {
    return this.views.length > 0;
  }

  /** Show `pictures` ([{url, name}]) with the maps in `diagnostics` of an answer, and the box that it was made to look at. */
  show(pictures, { text, diagnostics, title, applied }, asked = null) {
    const [layer, token] = [byId("layer"), byId("token")];
    Object.assign(this, { diagnostics, title, text, word: null });
    this.patches = diagnostics?.patches ?? [];
    this.layers = this.patches[0]?.layers ?? [];
    if (Number(layer.max) !== this.layers.length) {
      layer.max = String(this.layers.length);
      layer.value = "0"; // the mean of all layers
    }
    const words = diagnostics?.tam?.length ? wordsOf(text, diagnostics.tam) : [];
    this.tokens = words.flatMap((word, index) => word.tokens.map((one) => ({ ...one, index })));
    Object.assign(token, { max: String(this.tokens.length), value: "0" });
    this.views = pictures.map((picture, i) => this.#view(picture, i, pictures.length));
    this.#showBox(asked, applied?.look_at ?? null);
    byId("views").replaceChildren(...this.views.map((view) => view.figure));
    byId("look").hidden = pictures.length === 0;
    byId("layer-row").hidden = this.layers.length === 0;
    byId("token-row").hidden = this.tokens.length === 0;
    byId("look-controls").hidden = !this.layers.length && !this.tokens.length;
    this.draw();
    if (document.activeElement === document.body) this.views[this.returning - 1]?.form?.button.focus();
    this.returning = null;
  }

  /** Outline the box that the request asked for: drawn through where the shown answer has it, dashed where it has not. */
  #showBox(asked, applied) {
    const box = asked ? (asked.box ?? [0, 0, 1, 1]) : null;
    this.views.forEach(({ image, frame, form, stack }) => {
      const own = box && image === (asked.image ?? 1) ? box : null;
      frame.show(own);
      form?.shows(own);
      stack.classList.toggle("plain-box", !applied);
    });
    byId("box-row").hidden = !this.drawable || !this.views.length;
    byId("box-clear").hidden = box === null;
  }

  #view(picture, i, count) {
    const { diagnostics } = this;
    const canvas = h("canvas", { width: SIDE, height: SIDE, class: "heat", "data-image": i + 1 });
    const image = h("img", { src: picture.url, alt: `Image ${i + 1}` });
    const stack = h("div", { class: "stack" }, image, canvas);
    const drawn = this.drawable ? (box) => this.boxed(i + 1, box) : null;
    const frame = outline(stack, drawn);
    const given = (box) => {
      this.returning = i + 1; // to its button, when the answer is there
      drawn(box);
    };
    const form = drawn && edges(i + 1, frame, given);
    const share = h("span", { class: "soft" });
    const focused = diagnostics?.focus?.image === i + 1 && count > 1;
    const name = `${picture.name.replace(/\.\w+$/, "")}-map`;
    const save = () => savePng(name, { image, canvas, top: this.top, note: `Image ${i + 1}. ${this.said}`, gray: this.gray });
    const figure = h(
      "figure",
      { class: `view c-${(i % 6) + 1}${focused ? " focused" : ""}` },
      stack,
      h(
        "figcaption",
        {},
        h("b", {}, `Image ${i + 1}`),
        focused && h("span", { class: "chip accent" }, "focused"),
        share,
        h(
          "button",
          { type: "button", class: "small link", "aria-label": `Save PNG of the map of image ${i + 1}`, on: { click: save } },
          "Save PNG",
        ),
        form?.button,
      ),
      form?.fields,
    );
    return { image: i + 1, grid: diagnostics?.images?.[i]?.grid ?? null, canvas, share, stack, frame, form, figure };
  }

  /** Show the map of a word, or with null what the slider is at. */
  point(word) {
    this.word = word ?? this.tokens[Number(byId("token").value) - 1] ?? null;
    this.draw();
  }

  #scrub() {
    this.point(null);
    this.follow(this.word?.index ?? null);
  }

  draw() {
    const at = Number(byId("layer").value);
    const opacity = Number(byId("opacity").value) / 100;
    const smooth = byId("smooth").checked;
    const layerName = at === 0 ? "mean" : String(this.layers?.[at - 1] ?? "");
    const token = Number(byId("token").value);
    this.#label("layer", layerName, at === 0 ? "mean of all layers" : `layer ${layerName}`);
    const said = token === 0 ? "all" : `${token} of ${this.tokens.length}: “${this.tokens[token - 1]?.text}”`;
    this.#label("token", said, said);
    byId("opacity-value").textContent = `${byId("opacity").value} %`;
    const maps = this.views.map((view) => this.mapOf(view.image, at));
    const sum = (map) => map.reduce((whole, value) => whole + value, 0);
    const total = sum(maps.filter(Boolean).flat());
    this.top = Math.max(0, ...maps.filter(Boolean).flat());
    this.gray = byId("gray").checked;
    this.views.forEach((view, i) => {
      const map = this.top > 0 ? maps[i] : null; // where there is nothing, nothing is laid over the picture
      const drawn = view.grid !== null && drawHeat(view.canvas, map, view.grid, { top: this.top, opacity, smooth });
      view.canvas.dataset.drawn = String(drawn);
      view.stack.classList.toggle("gray", drawn && this.gray);
      const share = drawn && total > 0 && this.views.length > 1;
      view.share.textContent = share ? `${percent(sum(maps[i]) / total)} of this map` : "";
    });
    byId("scale").hidden = this.top === 0;
    byId("scale-name").textContent = this.word ? "activation" : "attention";
    byId("scale-top").textContent = short(this.top);
    this.said = this.note(maps, layerName, at);
    const more = this.tokens.length > 0 && this.word === null;
    byId("look-note").textContent = more
      ? `${this.said} Hover or focus a word of the answer, or move Token, to see its own map.`
      : this.said;
  }

  #label(id, shown, spoken) {
    byId(`${id}-value`).textContent = shown;
    byId(id).setAttribute("aria-valuetext", spoken);
  }

  mapOf(image, at) {
    if (this.word) return this.word.maps[image] ?? null;
    const rho = this.patches.find((entry) => entry.image === image)?.rho;
    if (!rho?.length) return null;
    return at === 0 ? meanMap(rho) : rho[at - 1];
  }

  note(maps, layerName, at) {
    if (this.word)
      return maps.some((map) => map?.some((value) => value > 0))
        ? `What “${this.word.text}” rests on (token activation map).`
        : `“${this.word.text}” rests on no patch of the images.`;
    if (this.layers.length)
      return `Attention to each patch, ${at === 0 ? "mean of all layers" : `layer ${layerName}`}, mean over heads.`;
    return this.tokens.length ? "" : "The answer has no patch maps for these images.";
  }
}
