// Wide formulas and tables scroll: let the keyboard reach them.
new MutationObserver(() => {
  document
    .querySelectorAll('mjx-container[display="true"]:not([tabindex]), .pst-scrollable-table-container:not([tabindex])')
    .forEach((region) => region.setAttribute("tabindex", "0"));
}).observe(document.documentElement, { childList: true, subtree: true });

// The bibliography calls itself a list, of which its entries are no items.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".citation-list[role=list]").forEach((list) => list.removeAttribute("role"));
});
