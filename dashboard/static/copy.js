// A button that copies a string; where the page may not, it selects the string instead.
const SAID_MS = 2000;

/** Copy the string of an element, and say so on the button. */
export async function copy(button, element) {
  const name = button.dataset.name ??= button.textContent;
  try {
    await navigator.clipboard.writeText(element.textContent);
    button.textContent = "Copied";
  } catch {  // no permission, or not a secure context: plain HTTP from another host
    getSelection().selectAllChildren(element);
    button.textContent = "Selected: Ctrl+C";
  }
  setTimeout(() => { button.textContent = name; }, SAID_MS);
}
