// The list of what was asked before.

import { byId, h } from "./dom.js";
import { forget, keptAnswers } from "./keep.js";

const when = (time) =>
  new Date(time).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

/** Fill the list whenever it is opened; `goBack(entry)` is called with the one that is chosen. */
export function showHistory(goBack) {
  const box = byId("history");
  const draw = async () => {
    const entries = await keptAnswers();
    byId("history-clear").hidden = entries.length === 0;
    byId("history-list").replaceChildren(...entries.map((entry) => row(entry, goBack)));
    if (!entries.length) byId("history-list").replaceChildren(h("li", { class: "nothing" }, "Nothing yet."));
  };
  box.addEventListener("beforetoggle", (event) => event.newState === "open" && draw());
  byId("history-clear").addEventListener("click", async () => {
    await forget(0);
    draw();
  });
}

function row(entry, goBack) {
  const { form, results, time } = entry;
  const pictures = [...form.turns, form].reduce((sum, turn) => sum + turn.pictures.length, 0);
  const asked = [...new Set(results.flatMap(({ chips }) => chips ?? []))];
  const said = [...asked, when(time), pictures === 1 ? "1 image" : pictures ? `${pictures} images` : ""];
  const choose = () => {
    byId("history").hidePopover();
    goBack(entry);
  };
  return h(
    "li",
    {},
    h(
      "button",
      { type: "button", on: { click: choose } },
      h("b", {}, form.question),
      h("span", {}, results.map(({ title, text }) => `${title}: ${text}`).join(" · ")),
      h("small", { class: "soft" }, said.filter(Boolean).join(" · ")),
    ),
  );
}
