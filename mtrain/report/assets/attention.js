// Attention maps: a small picture of each layer and head, and the chosen one as a table of percentages.
"use strict";
function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

document.querySelectorAll("[data-attention]").forEach(async (place) => {
  const map = JSON.parse(place.querySelector("script").textContent);
  const bytes = Uint8Array.from(atob(map.packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const weights = new Uint8Array(await new Response(stream).arrayBuffer());

  // Where the heads of each layer begin.
  const offsets = {};
  let end = 0;
  for (const [kind, { rows, columns, heads, layers }] of Object.entries(map.kinds)) {
    const size = rows.length * columns.length;
    offsets[kind] = { size, start: (layer, head) => offsets[kind].first + (layer * heads + head) * size, first: end };
    end += layers * heads * size;
  }

  // The percentages of one head, or the mean of all heads of a layer.
  function matrix(kind, layer, head) {
    const { size, start } = offsets[kind], { heads } = map.kinds[kind];
    if (head !== null) return weights.subarray(start(layer, head), start(layer, head) + size);
    const all = Array.from({ length: heads }, (_, h) => weights.subarray(start(layer, h), start(layer, h) + size));
    return Uint8Array.from({ length: size }, (_, i) => Math.round(all.reduce((sum, one) => sum + one[i], 0) / heads));
  }

  const table = place.querySelector("table"), buttons = place.querySelector(".heads");
  function show(kind, layer, head) {
    const { rows, columns, name } = map.kinds[kind], values = matrix(kind, layer, head);
    const cell = (text) => element("td", { textContent: text });
    const heading = (token, scope) => element("th", { scope }, element("bdi", { textContent: token }));
    const isolated = (token) => `\u2068${token}\u2069`;  // as <bdi> does in HTML
    table.caption.textContent = `${name}, layer ${layer + 1}, ${head === null ? "mean of the heads" : `head ${head + 1}`}`;
    table.tHead.replaceChildren(element("tr", {}, cell(""), ...columns.map((token) => heading(token, "col"))));
    table.tBodies[0].replaceChildren(...rows.map((text, r) => {
      const cells = columns.map((to, c) => {
        const value = values[r * columns.length + c], td = cell(value >= 5 ? value : "");
        td.style.setProperty("--w", value);
        td.title = `${isolated(text)} → ${isolated(to)}: ${value}%`;
        return td;
      });
      return element("tr", {}, heading(text, "row"), ...cells);
    }));
    buttons.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed",
      button.dataset.layer == layer && button.dataset.head == String(head)));
  }

  function picture(kind, layer, head) {
    const { rows, columns } = map.kinds[kind], values = matrix(kind, layer, head);
    const canvas = element("canvas", { width: columns.length, height: rows.length });
    canvas.setAttribute("aria-hidden", "true");
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    values.forEach((value, i) => image.data.set([47, 129, 247, Math.round(value * 2.55)], 4 * i));
    context.putImageData(image, 0, 0);
    return canvas;
  }

  function list(kind) {
    const { heads, layers, shown } = map.kinds[kind];
    buttons.replaceChildren(...Array.from({ length: layers }, (_, layer) => {
      const row = element("div", {}, element("span", { textContent: `Layer ${layer + 1}` }));
      row.setAttribute("role", "group");
      row.setAttribute("aria-label", `Layer ${layer + 1}`);
      row.append(...[null, ...Array(heads).keys()].map((head) => {
        const text = element("span", { textContent: head === null ? "mean" : head + 1 });
        const button = element("button", { type: "button" }, picture(kind, layer, head), text);
        Object.assign(button.dataset, { layer, head });
        button.setAttribute("aria-label", `Layer ${layer + 1}, ${head === null ? "mean" : `head ${head + 1}`}`);
        button.addEventListener("click", () => show(kind, layer, head));
        return button;
      }));
      return row;
    }));
    show(kind, shown, null);
  }
  place.querySelectorAll("input[type=radio]").forEach((input) => input.addEventListener("change", () => list(input.value)));
  list(place.querySelector("input:checked")?.value ?? "cross");  // browsers restore the choice on reload
});
