//! Prometheus: the rules as promtool judges them, and a real server beside a running gateway.

mod dashboards;
mod outage;
mod rules;
mod server;
