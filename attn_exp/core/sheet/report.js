// Sorts and filters the tables. Without it they are all there, in the order of the comparison.
"use strict";
const number = (text) => {
  const found = /^[^\d+-]?([+-]?\d[\d.]*(?:e[+-]?\d+)?)/i.exec(text.trim());
  return found ? parseFloat(found[1]) : null;
};
const matches = (text, wanted) => {
  const bound = /^(<=|>=|<|>|=)\s*([+-]?[\d.]+(?:e[+-]?\d+)?)$/i.exec(wanted);
  if (!bound) return text.toLowerCase().includes(wanted.toLowerCase());
  const one = number(text), other = parseFloat(bound[2]);
  if (one === null) return false;
  return { "<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other, "=": one === other }[bound[1]];
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows].map((row) => ({ row, texts: [...row.cells].map((cell) => cell.textContent) }));
  const count = table.closest("section").querySelector(".count");
  const inputs = [];
  // A browser takes seconds to lay out ten thousand rows: the others are a click away.
  let order = rows, most = 1000;
  const all = document.createElement("button");
  all.type = "button";
  all.textContent = "show all rows";
  all.addEventListener("click", () => { most = Infinity; show(); });
  table.parentElement.before(all);
  const show = () => {
    const wanted = inputs.map((input) => input.value.trim());
    let found = 0;
    for (const { row, texts } of order) {
      const kept = wanted.every((one, index) => !one || matches(texts[index], one));
      row.hidden = !kept || found >= most;
      found += kept;
    }
    const first = found > most ? `, the first ${most} shown` : "";
    count.textContent = !filters ? "" : (found === rows.length ? `${found} rows` : `${found} of ${rows.length} rows`) + first;
    all.hidden = found <= most;
  };
  // A few rows need no filter.
  const filters = rows.length > 12 ? table.tHead.insertRow() : null;
  heads.forEach((head, index) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.type = "button";
    head.replaceChildren(button);
    head.classList.add("sorts");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map((one, at) => ({ one, at, text: one.texts[index], value: number(one.texts[index]) }));
      keyed.sort((a, b) => {
        // What has no value stands last in both directions.
        if (!a.text || !b.text) return (!a.text) - (!b.text) || a.at - b.at;
        const both = a.value !== null && b.value !== null;
        const order = both ? a.value - b.value
          : (a.value === null) - (b.value === null) || a.text.localeCompare(b.text);
        return (down ? -order : order) || a.at - b.at;
      });
      order = keyed.map(({ one }) => one);
      show();
      for (const { row } of order) body.append(row);
    });
    if (!filters) return;
    const input = document.createElement("input");
    input.type = "search";
    input.setAttribute("aria-label", `filter ${head.textContent}`);
    input.placeholder = head.classList.contains("num") ? ">=" : "filter";
    input.addEventListener("input", show);
    inputs.push(input);
    filters.insertCell().append(input);
  });
  show();
}
