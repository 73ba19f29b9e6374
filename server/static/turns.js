// The turns of a conversation before the one that is written.

import { byId, h } from "./dom.js";

/** The turns [{pictures, context, question, answer}] in the list; calls `changed()` after every change by hand. */
export class Turns {
  constructor(changed) {
    Object.assign(this, { changed, all: [] });
    byId("turns-clear").addEventListener("click", () => {
      this.show([]);
      changed();
    });
  }

  show(turns) {
    this.all = [...turns];
    byId("turns-section").hidden = this.all.length === 0;
    byId("turns").replaceChildren(...this.all.map((turn, i) => this.#row(turn, i)));
    byId("turns").scrollTop = byId("turns").scrollHeight;
  }

  #row({ pictures, question, answer }, i) {
    const count = pictures.length;
    const cut = () => {
      this.show(this.all.slice(0, i));
      this.changed();
    };
    return h(
      "li",
      {},
      h(
        "p",
        {},
        h("b", {}, question),
        count > 0 && h("span", { class: "soft" }, ` (${count} image${count === 1 ? "" : "s"})`),
      ),
      h("p", {}, answer),
      h("button", { type: "button", "aria-label": `Remove turn ${i + 1} and all later turns`, on: { click: cut } }, "×"),
    );
  }
}
