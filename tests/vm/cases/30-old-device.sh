# guest: old
# later: it runs nothing of weft
# Debian 12's rdma-core 44 on the same kernel: rxe0 works, and libfabric 1.17's verbs provider on
# it. (Not fi_pingpong: with these two libraries its server's fi_getinfo without a node fails in
# rdma_getaddrinfo.)
run() {
	core=$(dpkg-query -W -f '${Version}' libibverbs1)
	echo "kernel $(uname -r), rdma-core $core"
	case $core in 44.*) ;; *) return 1 ;; esac
	ibv_devinfo -d rxe0 | grep -q PORT_ACTIVE || return 1
	fipeer_both verbs verbs 10.77.0.1 transfer && fipeer_both verbs verbs fd77::1 transfer
}
