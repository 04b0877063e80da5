# later: it runs nothing of weft
# rdma-core's own program on rxe0, over the IPv4 and the IPv6 GID.
run() {
	for want in 0000:0000:0000:0000:0000:ffff:0a4d:0001 fd77:0000:0000:0000:0000:0000:0000:0001; do
		index=$(cd /sys/class/infiniband/rxe0/ports/1/gids && grep -l "$want" * | head -1)
		[ -n "$index" ] || { echo "no GID $want"; return 1; }
		ibv_rc_pingpong -d rxe0 -g "$index" -n 50 >/tmp/server 2>&1 &
		await_port 18515 || return 1
		ibv_rc_pingpong -d rxe0 -g "$index" -n 50 10.77.0.1 || return 1
		wait $! || { cat /tmp/server; return 1; }
	done
}
