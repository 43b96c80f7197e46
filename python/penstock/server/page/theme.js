// Applies the chosen theme before the page is painted; without a choice, the system's applies.
try {
  const theme = localStorage.getItem("penstock:theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // There is no storage.
}
