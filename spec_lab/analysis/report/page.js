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
  const sort = (heading, column) => {
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
  };
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sort(heading, column));
    heading.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sort(heading, column);
    });
  });
}
// Show the rows that contain every word of the filter and have the chosen values.
for (const data of document.querySelectorAll(".data")) {
  const inputs = [...data.querySelectorAll(".filter")];
  const choices = [...data.querySelectorAll(".choice")];
  if (!inputs.length && !choices.length) continue;
  const rows = [...data.querySelectorAll("tbody tr")];
  const show = () => {
    const words = inputs.flatMap((input) => input.value.toLowerCase().split(/\s+/).filter(Boolean));
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const chosen = choices.every((one) => !one.selectedIndex || row.cells[one.dataset.column].textContent.trim() === one.value.trim());
      row.hidden = !chosen || !words.every((word) => text.includes(word));
    }
    data.querySelector(".shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  for (const one of [...inputs, ...choices]) one.addEventListener("input", show);
  show();
}
