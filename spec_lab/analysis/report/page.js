"use strict";
// Show the outputs of one arm at a time.
const arm = document.getElementById("arm");
if (arm) {
  const show = () => {
    for (const output of document.querySelectorAll(".output")) output.hidden = output.dataset.arm !== arm.value;
  };
  arm.addEventListener("change", show);
  show();
}
// Sort a table by a click on a heading: numbers by value, the rest by text, empty cells last.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.addEventListener("click", () => {
    const before = heading.getAttribute("aria-sort"); // numbers begin with the largest
    const ascending = before ? before === "descending" : !heading.classList.contains("number");
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const keyed = [...table.tBodies[0].rows].map((row) => {
      const cell = row.cells[column];
      const text = (cell.dataset.value ?? cell.textContent).trim();
      return { row, text, value: text === "" ? NaN : Number(text) };
    });
    keyed.sort((a, b) => {
      if ((a.text === "") !== (b.text === "")) return a.text === "" ? 1 : -1;
      const numbers = !Number.isNaN(a.value) && !Number.isNaN(b.value);
      return (ascending ? 1 : -1) * (numbers ? a.value - b.value : a.text.localeCompare(b.text));
    });
    table.tBodies[0].append(...keyed.map((one) => one.row));
  }));
}
// Show the rows that contain every word of the filter.
for (const filter of document.querySelectorAll(".filter")) {
  const section = filter.closest("section");
  const rows = [...section.querySelectorAll("tbody tr")];
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    section.querySelector(".shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  filter.addEventListener("input", show);
  show();
}
