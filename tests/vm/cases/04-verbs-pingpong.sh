# later: it runs nothing of weft
# libfabric's own verbs provider, as the baseline and as a peer: fi_pingpong over IPv4 and IPv6.
run() {
	pingpong verbs 10.77.0.1 -I 5 -S 4096 && pingpong verbs fd77::1 -6 -I 5 -S 4096
}
