// Pages with widgets load this between require.js and the widget manager.

// The manager's fonts lie below the place from which require.js would load it.
window.requirejs.config({ baseUrl: new URL("vendor/", document.currentScript.src).href });

// The manager still calls the MathJax 2 API to typeset labels.
window.addEventListener("load", () => {
  if (window.MathJax && !window.MathJax.Hub && window.MathJax.typesetPromise) {
    window.MathJax.Hub = { Queue: (job) => window.MathJax.typesetPromise([job[2]]) };
  }
});

// A slider's handle has no name of its own: give screen readers the label beside it.
new MutationObserver(() => {
  document.querySelectorAll(".widget-slider .noUi-handle:not([aria-label])").forEach((handle) => {
    const label = handle.closest(".widget-slider").querySelector(".widget-label");
    if (label && label.textContent) handle.setAttribute("aria-label", label.textContent);
  });
}).observe(document.documentElement, { childList: true, subtree: true });
