//! The page that is served at `/`: one HTML file without dependencies, part of the program.
//!
//! It knows nothing that other clients do not: it speaks to the API of the server it came from.

/// The page.
pub const PAGE: &str = include_str!("index.html");

/// A service worker that removes itself. Browsers keep the one of a web UI that was served here before, and would go on
/// showing that UI.
pub const SERVICE_WORKER: &str = "\
self.addEventListener('install', () => self.skipWaiting());
self.addEventListener('activate', (event) => event.waitUntil((async () => {
  for (const name of await caches.keys()) await caches.delete(name);
  await self.registration.unregister();
  for (const client of await self.clients.matchAll({ type: 'window' })) client.navigate(client.url);
})()));
";
