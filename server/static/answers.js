// The cards of answers, side by side.

import { h } from "./dom.js";
import { guardReport } from "./guard.js";
import { differing, wordsOf } from "./words.js";

/** A card: its chips, its text while it streams, its words when it has ended. `key` begins the ids of its parts. */
export class Card {
  constructor({ key, title, chips, plain, alone }) {
    const part = (name, tag = "p", props = {}, ...children) =>
      (this[name] = h(tag, { id: `${key}-${name}`, ...props }, ...children));
    Object.assign(this, { key, plain });
    this.element = h(
      "article",
      { class: plain && key !== "answer" ? "panel answer plain" : "panel answer", id: key, "aria-labelledby": `${key}-title` },
      h("header", {}, part("title_", "h2", { id: `${key}-title` }, title), part("chips", "span", { class: "chips" })),
      part("live", "p", { class: "text", "aria-live": alone && key !== "base" ? "polite" : null }),
      part("words", "div", {
        class: "text words",
        role: "toolbar",
        "aria-label": `Words, ${title}: move with the arrow keys to see the map of each`,
        hidden: true,
      }),
      part("guard", "div"),
      h("footer", { class: "soft" }, part("meta", "span"), part("on", "span")),
    );
    this.tell(chips);
  }

  tell(chips) {
    this.chips.replaceChildren(
      ...chips.map((text) => h("span", { class: "chip accent" }, text)),
      ...(this.plain ? [h("span", { class: "chip" }, "plain model")] : []),
    );
  }

  /** Show the whole answer: what differs from `reference` is marked, and each word shows its map in `look`. */
  finish(result, reference, look, goOn) {
    const { text, diagnostics } = result;
    this.guard.replaceChildren(...(result.guard ? [guardReport(result.guard)] : []));
    this.live.hidden = false;
    this.words.hidden = true;
    const marks = reference === null ? [] : differing(reference, text);
    let word = 0;
    this.live.replaceChildren(
      ...text.split(/(\s+)/).map((piece) => (piece.trim() && marks[word++] ? h("mark", {}, piece) : piece)),
    );
    const said = [result.meta];
    if (reference !== null) said.push(text === reference ? "text unchanged" : "text changed");
    this.meta.textContent = said.filter(Boolean).join(" · ");
    const button = h("button", { type: "button", class: "small link", on: { click: goOn } }, "Follow up");
    this.on.replaceChildren(...(text ? [button] : []));
    if (!diagnostics?.tam?.length || !look.shown) return;
    this.#offer(wordsOf(text, diagnostics.tam), marks, look);
  }

  /** Mark the word that is shown elsewhere; null for none. */
  point(index) {
    [...this.words.children].forEach((button, i) => button.classList.toggle("now", i === index));
  }

  // The arrow keys move between the words, a click keeps one.
  #offer(words, marks, look) {
    let pinned = null;
    const buttons = words.map((word, i) =>
      h(
        "button",
        { type: "button", class: marks[i] ? "word differs" : "word", tabindex: i === 0 ? 0 : -1, "aria-pressed": "false" },
        word.text,
      ),
    );
    const back = () => look.point(pinned === null ? null : words[pinned]);
    const pin = (i) => {
      pinned = pinned === i ? null : i;
      buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === pinned)));
      back();
    };
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
    this.words.replaceChildren(...buttons.flatMap((button, i) => (i ? [" ", button] : [button])));
    this.words.hidden = false;
    this.live.hidden = true;
  }
}
