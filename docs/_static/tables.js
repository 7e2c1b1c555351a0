// Helps tables to fit: see tables.css.
const BREAK_AFTER = /(?<=[._/(,=:])/;

// Code in cells may be broken after a dot, a comma and so on, and not within a name.
function allowBreaks(code) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(BREAK_AFTER);
    const pieces = parts.flatMap((part) => [part, document.createElement("wbr")]);
    text.replaceWith(...pieces.slice(0, -1));
  }
}

// A table whose cells are sentences is marked, and each cell gets its column's name.
function mark(table) {
  const names = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
  const cells = [...table.querySelectorAll("tbody td")];
  const isSentence = (td) => td.cellIndex > 0 && td.textContent.length > 30;
  if (names.length < 3 || !cells.some(isSentence)) return;
  table.classList.add("of-sentences");
  for (const td of cells) {
    const name = names[td.cellIndex];
    if (!td.textContent.trim()) td.classList.add("blank");
    else if (name) td.dataset.column = name;
  }
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.docutils").forEach(mark);
  document.querySelectorAll("table.docutils td code.literal").forEach(allowBreaks);
});
