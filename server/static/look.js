// The pictures with heat maps over them: attention by layer, or the map of a word of the answer.

import { byId, h, percent, short } from "./dom.js";
import { drawHeat, heatColour, meanMap } from "./heat.js";

const SIDE = 168; // of the canvas; it is stretched over the picture

/** Words of `text` with the maps of their tokens, found in the text in order: [{text, maps: {image: map}}]. */
export function wordsOf(text, tam) {
  const tokens = [...Map.groupBy(tam, (entry) => entry.position).values()];
  const places = [];
  let cursor = 0;
  for (const entries of tokens) {
    const piece = entries[0].token.trim();
    const at = piece ? text.indexOf(piece, cursor) : -1;
    if (at < 0) continue; // a token without visible text, such as the end of the answer
    places.push({ from: at, to: at + piece.length, entries });
    cursor = at + piece.length;
  }
  return [...text.matchAll(/\S+/g)].map((match) => {
    const [from, to] = [match.index, match.index + match[0].length];
    const inside = places.filter((place) => place.from < to && place.to > from).flatMap((place) => place.entries);
    const maps = {};
    for (const [image, entries] of Map.groupBy(inside, (entry) => entry.image))
      maps[image] = meanMap(entries.map((entry) => entry.map));
    return { text: match[0], maps };
  });
}

/** The section "Where it looked". */
export class Look {
  constructor() {
    this.views = [];
    this.word = null;
    for (const id of ["layer", "opacity", "smooth"]) byId(id).addEventListener("input", () => this.draw());
    const scale = byId("scale-bar").getContext("2d");
    for (let x = 0; x < 96; x += 1) {
      scale.fillStyle = `rgb(${heatColour(x / 95).join(" ")})`;
      scale.fillRect(x, 0, 1, 8);
    }
  }

  /** Show `pictures` ([{url}]) with the maps in `diagnostics`. */
  show(pictures, diagnostics) {
    const layer = byId("layer");
    this.diagnostics = diagnostics;
    this.word = null;
    this.patches = diagnostics?.patches ?? [];
    this.layers = this.patches[0]?.layers ?? [];
    if (Number(layer.max) !== this.layers.length) {
      layer.max = String(this.layers.length);
      layer.value = "0"; // the mean of all layers
    }
    const images = diagnostics?.images ?? [];
    this.views = pictures.map((picture, i) => {
      const canvas = h("canvas", { width: SIDE, height: SIDE, class: "heat", "data-image": i + 1 });
      const image = h("img", { src: picture.url, alt: `Picture ${i + 1}` });
      const share = h("span", { class: "soft" });
      const focused = diagnostics?.focus?.image === i + 1 && pictures.length > 1;
      const figure = h(
        "figure",
        { class: `view c-${(i % 6) + 1}${focused ? " focused" : ""}` },
        h("div", { class: "stack" }, image, canvas),
        h(
          "figcaption",
          {},
          h("b", {}, `Picture ${i + 1}`),
          focused && h("span", { class: "chip accent" }, "focused"),
          share,
        ),
      );
      return { image: i + 1, grid: images[i]?.grid ?? null, canvas, share, figure };
    });
    byId("views").replaceChildren(...this.views.map((view) => view.figure));
    byId("look").hidden = pictures.length === 0;
    byId("layer-row").hidden = this.layers.length === 0;
    byId("look-controls").hidden = !this.layers.length && !diagnostics?.tam?.length;
    this.draw();
  }

  /** Show the map of a word, or with null the attention again. */
  point(word) {
    this.word = word;
    this.draw();
  }

  draw() {
    const at = Number(byId("layer").value);
    const opacity = Number(byId("opacity").value) / 100;
    const smooth = byId("smooth").checked;
    const layerName = at === 0 ? "mean" : String(this.layers?.[at - 1] ?? "");
    byId("layer-value").textContent = layerName;
    byId("layer").setAttribute("aria-valuetext", at === 0 ? "mean of all layers" : `layer ${layerName}`);
    byId("opacity-value").textContent = `${byId("opacity").value} %`;
    const maps = this.views.map((view) => this.mapOf(view.image, at));
    const top = Math.max(0, ...maps.filter(Boolean).flat());
    const total = maps
      .filter(Boolean)
      .flat()
      .reduce((sum, value) => sum + value, 0);
    this.views.forEach((view, i) => {
      const drawn = view.grid !== null && drawHeat(view.canvas, maps[i], view.grid, { top, opacity, smooth });
      view.canvas.dataset.drawn = String(drawn);
      view.share.textContent =
        drawn && total > 0 && this.views.length > 1
          ? percent(maps[i].reduce((sum, value) => sum + value, 0) / total)
          : "";
    });
    byId("scale").hidden = top === 0;
    byId("scale-top").textContent = short(top);
    byId("look-note").textContent = this.note(maps, layerName, at);
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
        : `“${this.word.text}” rests on no patch of the pictures.`;
    if (this.layers.length) {
      const which = at === 0 ? "mean of all layers" : `layer ${layerName}`;
      const hint = this.diagnostics?.tam?.length ? " Hover or focus a word of the answer to see its own map." : "";
      return `Attention to each patch, ${which}.${hint}`;
    }
    if (this.diagnostics?.tam?.length) return "Hover or focus a word of the answer to see what it rests on.";
    return "This server gave no patch maps for these pictures.";
  }
}

/** Fill `bar` with buttons for `words`; the arrow keys move between them, a click keeps one. */
export function wordBar(bar, words, look) {
  let pinned = null;
  const buttons = words.map((word, i) =>
    h("button", { type: "button", class: "word", tabindex: i === 0 ? 0 : -1, "aria-pressed": "false" }, word.text),
  );
  const pin = (i) => {
    pinned = pinned === i ? null : i;
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === pinned)));
    look.point(pinned === null ? null : words[pinned]);
  };
  const back = () => look.point(pinned === null ? null : words[pinned]);
  buttons.forEach((button, i) => {
    button.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && look.point(words[i]));
    button.addEventListener("pointerleave", back);
    button.addEventListener("focus", () => button.matches(":focus-visible") && look.point(words[i]));
    button.addEventListener("blur", back);
    button.addEventListener("click", () => pin(i));
    button.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: words.length - 1 }[event.key];
      if (event.key === "Escape" && pinned !== null) pin(pinned);
      if (to === undefined || !buttons[to]) return;
      event.preventDefault();
      button.tabIndex = -1;
      buttons[to].tabIndex = 0;
      buttons[to].focus();
    });
  });
  bar.replaceChildren(...buttons.flatMap((button, i) => (i ? [" ", button] : [button])));
}
