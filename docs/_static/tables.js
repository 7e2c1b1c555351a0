// Marks tables whose cells are sentences, for tables.css: see there.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    if (!cells.some((td) => td.textContent.length > 60)) continue;
    table.classList.add("of-sentences");
    for (const td of cells) {
      const name = names[td.cellIndex];
      if (name) td.dataset.column = name;
    }
  }
});
