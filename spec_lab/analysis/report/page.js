"use strict";
// Charts. Expressions are interpreted (ast), so that the page needs no right to evaluate text as code.
for (const place of document.querySelectorAll("[data-spec]")) {
  const spec = JSON.parse(document.getElementById(place.dataset.spec).textContent);
  spec.config.legend.columns = Math.max(1, Math.floor((place.clientWidth - 130) / spec.usermeta.legend));
  const actions = { export: true, source: false, compiled: false, editor: false };
  vegaEmbed(place, spec, { renderer: "svg", ast: true, actions }).catch((error) => {
    place.textContent = "This chart could not be drawn: " + error.message;
    console.error(error);
  });
}
// Outputs of one arm at a time.
const arm = document.getElementById("arm");
if (arm) {
  const show = () => {
    for (const one of document.querySelectorAll(".output")) one.hidden = one.dataset.arm !== arm.value;
  };
  arm.addEventListener("change", show);
  show();
}
// Tables that a click on a heading sorts: numbers by value, the rest by text, empty cells last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const before = head.getAttribute("aria-sort"); // numbers begin with the largest
    const up = before ? before === "descending" : !head.classList.contains("number");
    const sign = up ? 1 : -1;
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => {
      const cell = row.cells[column];
      const text = (cell.dataset.value ?? cell.textContent).trim();
      return { text, value: text === "" ? NaN : Number(text.replace("%", "")) };
    };
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, ...key(row) }));
    rows.sort((a, b) => {
      if ((a.text === "") !== (b.text === "")) return a.text === "" ? 1 : -1;
      const numbers = !Number.isNaN(a.value) && !Number.isNaN(b.value);
      return sign * (numbers ? a.value - b.value : a.text.localeCompare(b.text));
    });
    body.append(...rows.map((one) => one.row));
  }));
}
// Rows that contain what was typed.
const filter = document.getElementById("filter");
if (filter) {
  const rows = [...document.querySelectorAll("#rows tbody tr")];
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  filter.addEventListener("input", show);
  show();
}
