// What the form holds as the body of a chat completion.

/** The pictures of a form, those of earlier turns first. */
export const picturesOf = (form) => [...form.turns, form].flatMap(({ pictures }) => pictures);

/** The body of the request. `form` is what `readForm` of form.js gives; pictures become what `url(picture, i)` gives. */
export function bodyOf(form, url) {
  let count = 0;
  const asked = ({ pictures, context, question }) => {
    const content = pictures.map((picture) => ({ type: "image_url", image_url: { url: url(picture, count++) } }));
    if (context) content.push({ type: "text", text: marked(context), span: "context" });
    return { role: "user", content: [...content, { type: "text", text: question }] };
  };
  const body = {
    model: form.model,
    messages: [
      ...(form.system ? [{ role: "system", content: form.system }] : []),
      ...form.turns.flatMap((turn) => [asked(turn), { role: "assistant", content: turn.answer }]),
      asked(form),
    ],
    max_tokens: form.maxTokens,
    temperature: form.temperature,
  };
  if (form.seed !== null) body.seed = form.seed;
  return { ...body, ...extras(form) };
}

/** The fields beyond OpenAI's. */
export function extras(form) {
  const fields = {};
  if (form.strength !== 0) {
    const vector = form.vector === "modality-preference" ? {} : { vector: form.vector };
    const toward = form.auto ? "auto" : form.strength > 0 ? "vision" : "text";
    const when = form.when ? { when: { vector: form.when } } : {};
    fields.steering = { ...vector, toward, strength: Math.abs(form.strength), ...when };
  }
  Object.assign(fields, form.interventions);
  if (form.baseline && Object.keys(fields).length) fields.baseline = true;
  if (form.guard) fields.guard = form.guard;
  if (form.include.length) fields.diagnostics = { include: form.include };
  return fields;
}

// The form of the papers' prompts; the parts of a message are put together as they are, so the line ends here.
function marked(context) {
  return `${/^text context:/i.test(context) ? "" : "Text context: "}${context}\n`;
}

export const fileName = (picture, i) => `image${i + 1}.${picture.extension}`;
